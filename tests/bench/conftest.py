"""A server whose answers a function makes."""

import asyncio
import threading
from functools import partial

import pytest


async def serve(answer, connections, reader, writer):
    connections.add(asyncio.current_task())
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            _, _, after = head.lower().partition(b"content-length: ")
            length = int(after.split(b"\r\n")[0] or 0)
            reply = answer(await reader.readexactly(length))
            if reply is None:
                break
            writer.write(reply)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client has left
    except asyncio.CancelledError:
        writer.transport.abort()  # what was not read yet is for nobody
        raise
    finally:
        writer.close()


@pytest.fixture
def answering():
    """A function that starts a server whose answers are made by a function of the request's
    body."""
    loops = []

    def start(answer):
        ready, addresses, connections = threading.Event(), [], set()

        async def run():
            server = await asyncio.start_server(partial(serve, answer, connections), "127.0.0.1", 0)
            addresses.append(server.sockets[0].getsockname())
            loops.append((asyncio.get_running_loop(), stop := asyncio.Event(), thread))
            ready.set()
            await stop.wait()
            await asyncio.sleep(0.01)  # what has connected is accepted: closing forgets it
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks & connections:  # those of asyncio, which accept, end
                    task.cancel()
                await asyncio.sleep(0.01)  # connections are closed in the loop's next turn
            server.close()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        ready.wait()
        return "http://{}:{}".format(*addresses[0])

    yield start
    for loop, stop, thread in loops:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
