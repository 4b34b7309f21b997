"""A trainer that reads with hs_connectors, in an environment that has it: `trainer.py FROM FOLDER
COUNT` takes that many samples and stores each as `<document>.safetensors`, once.

FROM: a folder, whose documents are numbered from 0; or HOST:PORT of a Mooncake store, with the
parameters of each sample as a line of standard input.
"""

import json
import sys
import time
from pathlib import Path

from hs_connectors import FileTransfer, HiddenStatesTransfer, MooncakeTransfer
from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig
from safetensors.torch import save_file


def keep(sample: dict, folder: Path, document: str) -> None:
    path = folder / f"{document}.safetensors"
    assert not path.exists(), f"{document} came twice"
    save_file(sample, path)


def main(origin: str, folder: Path, count: int) -> None:
    transfer: HiddenStatesTransfer
    if ":" not in origin:
        transfer = FileTransfer(Path(origin))
        for document in range(count):
            while (sample := transfer.get_cached(document)) is None:
                time.sleep(0.01)
            keep(sample, folder, str(document))
            transfer.delete(f"{origin}/hs_{document}.safetensors")
        return
    config = MooncakeStoreConfig(
        master_server_address=origin, global_segment_size=1 << 24, local_buffer_size=1 << 26
    )
    transfer = MooncakeTransfer(MooncakeHiddenStatesStore(config))
    transfer.setup()
    for line in sys.stdin:
        manifest = json.loads(line)
        sample = transfer.get_generated(manifest)
        keep(sample, folder, manifest["handle"].rpartition("-")[2])
        transfer.delete(manifest["handle"])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
