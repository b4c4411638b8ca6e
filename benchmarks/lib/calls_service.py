"""A service for reward_calls.py that answers every request after a second, any number of them concurrently."""

import asyncio
import re

BODY = b'{"score": 1.0}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection until it is closed."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = LENGTH.search(head)
            await reader.readexactly(int(found[1]) if found else 0)
            await asyncio.sleep(1.0)
            writer.write(ANSWER)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def main() -> None:
    """Print the address and serve forever."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
