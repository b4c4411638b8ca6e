"""A local HTTP server for scores and judges, with delays and faults."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

Answer = Callable[[str, Any], tuple[int, Any] | tuple[int, Any, str]]


@asynccontextmanager
async def serving(answer: Answer, latency_s: float = 0.0, together: int = 1) -> AsyncIterator[str]:
    """Serve, and yield the address. Once `together` requests are there, `answer(path, body)` returns (status, body).

    A third value is a further header.
    """
    asked, enough = itertools.count(1), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            path = line.split()[1].decode()
            length = 0
            while (header := (await reader.readline()).strip().lower()) != b"":
                if header.startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            body = json.loads(await reader.readexactly(length))
            if next(asked) >= together:
                enough.set()
            await enough.wait()
            await asyncio.sleep(latency_s)
            status, said, *headers = answer(path, body)
            data = json.dumps(said).encode()
            head = "\r\n".join([f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", *headers, "", ""])
            writer.write(head.encode() + data)

    async with _listening(serve) as url:
        yield url


@asynccontextmanager
async def trickling(every_s: float) -> AsyncIterator[str]:
    """Serve, and yield the address: every reply is 40 bytes, one every `every_s`, and then the score."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b" " * 40 + b'{"score": 1}'
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n" % len(data))
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(every_s if byte == ord(" ") else 0)

    async with _listening(serve) as url:
        yield url


@asynccontextmanager
async def _listening(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
