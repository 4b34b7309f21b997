"""A trainer that reads with hs_connectors, in an environment that has it: `trainer.py FROM FOLDER
COUNT` takes that many samples of the folder FROM, whose documents are numbered from 0, and stores
each as `<document>.safetensors`, once.
"""

import sys
import time
from pathlib import Path

from hs_connectors import FileTransfer
from safetensors.torch import save_file


def main(origin: str, folder: Path, count: int) -> None:
    transfer = FileTransfer(Path(origin))
    for document in range(count):
        while (sample := transfer.get_cached(document)) is None:
            time.sleep(0.01)
        path = folder / f"{document}.safetensors"
        assert not path.exists(), f"{document} came twice"
        save_file(sample, path)
        transfer.delete(f"{origin}/hs_{document}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
