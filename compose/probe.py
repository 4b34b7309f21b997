"""Whether http://127.0.0.1:PORT/PATH answers 200: `python3 -IS probe.py PORT PATH [FILE]`.

It starts 20 times as fast as our package.

FILE holds the `user:password` to send; of several, separated by commas, the first.
"""

import socket
import sys
from binascii import b2a_base64

TIMEOUT_S = 10.0


def main(port: str, path: str, file: str = "") -> int:
    try:
        login = ""
        if file:
            with open(file, "rb") as opened:
                login = (
                    "Authorization: Basic "
                    + b2a_base64(opened.read().strip().partition(b",")[0]).decode().strip()
                    + "\r\n"
                )
        with socket.create_connection(("127.0.0.1", int(port)), TIMEOUT_S) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n{login}\r\n".encode())
            answer = b""
            while len(answer) < 4096 and (part := connection.recv(4096)):
                answer += part
    except OSError as error:
        print(f"port {port} is not checked, or does not answer: {error}")
        return 1
    if answer.split(b" ", 2)[1:2] == [b"200"]:
        return 0
    print(answer.partition(b"\r\n\r\n")[2].decode(errors="replace") or "no answer")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
