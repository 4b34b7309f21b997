"""The object store of a network of machines: `store_machine.py HOST PORT BUCKET` serves S3 there
until it is killed (packages/s3/tests/s3_kit.py).
"""

import sys
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "packages" / "s3" / "tests"))


def main() -> None:
    import s3_kit

    host, port, bucket = sys.argv[1:]
    proxy = s3_kit.FaultProxy(s3_kit.moto(), host=host, port=int(port))
    s3_kit.new_bucket(bucket)
    proxy.start()
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
