"""TLS in front of a Redis that has none: `python tls_proxy.py HOST PORT REDIS_PORT CERTIFICATE
KEY`; prints `ready`.
"""

import asyncio
import contextlib
import ssl
import sys


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.close()


async def main(host: str, port: str, redis_port: str, certificate: str, key: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind_reader, behind_writer = await asyncio.open_connection(
                "127.0.0.1", int(redis_port)
            )
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, behind_writer), pump(behind_reader, writer))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = await asyncio.start_server(serve, host, int(port), ssl=context)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
