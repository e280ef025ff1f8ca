"""What the gateway adds to a request: latency against asking the replica directly, and its own CPU time.

Three processes on one machine: this one asks; a replica that answers at once; the gateway. Run alternating, since
the machine's speed drifts. ``python tests/bench/bench_gateway.py [REQUESTS]`` prints JSON.
"""

import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import time
from multiprocessing.synchronize import Event

import httpx
import psutil
import uvicorn

from db.records import ReplicaId, ReplicaRecord
from infra.clock import SystemClock
from infra.settings import Settings
from serving.gateway.arrivals import ArrivalCounts
from serving.gateway.fleet import Fleet, snapshot
from serving.gateway.main import Gateway
from serving.model import FinishReason
from serving.wire import sse, tgi

TOKENS = 32
BODY = {"inputs": "x" * 200, "parameters": {"max_new_tokens": TOKENS}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def replica(port: int, stop: Event) -> None:
    token = tgi.WireToken(1, " word", -0.5)
    answer = tgi.Answer(
        text=" word" * TOKENS,
        finish_reason=FinishReason.LENGTH,
        generated_tokens=TOKENS,
        input_tokens=1,
        seed=None,
    )
    body = tgi.GenerateBody(inputs="x")
    events = [sse.event(tgi.token_event(i, token)) for i in range(1, TOKENS)]
    events.append(sse.event(tgi.last_event(body, TOKENS, token, answer, compat=False)))
    whole = sse.dumps(tgi.answer_body(body, answer, compat=False))
    head = b"HTTP/1.1 200 OK\r\nx-replica-id: a\r\ncontent-type: application/json\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in request.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                await reader.readexactly(length)
                if b"/generate_stream" not in request.split(b"\r\n", 1)[0]:
                    writer.write(head + f"content-length: {len(whole)}\r\n\r\n".encode() + whole)
                    await writer.drain()
                    continue
                writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
                for event in events:
                    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.001)
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", port):
            await asyncio.to_thread(stop.wait)

    asyncio.run(run())


def gateway(port: int, replica_port: int, stop: Event) -> None:
    fleet = Fleet()
    record = ReplicaRecord(
        id=ReplicaId("a"), url=f"http://127.0.0.1:{replica_port}", backbone="x", has_shard=False, started_s=0
    )
    fleet.swap(snapshot([(record, None)], None))
    app = Gateway(Settings(), fleet, ArrivalCounts("g", 1.0), SystemClock()).app()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, access_log=False))

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        await asyncio.to_thread(stop.wait)
        server.should_exit = True
        await serving

    asyncio.run(run())


def wait_up(url: str) -> None:
    for _ in range(400):
        try:
            if httpx.get(url + "/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"{url} does not come up")


def ask(http: httpx.Client, url: str) -> tuple[float, float]:
    """Return ms to the first byte and to the last."""
    started = time.perf_counter()
    first = 0.0
    with http.stream("POST", url, json=BODY) as answer:
        for _ in answer.iter_raw():
            first = first or time.perf_counter()
    return (first - started) * 1e3, (time.perf_counter() - started) * 1e3


def main(requests: int) -> None:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    replica_port, gateway_port = free_port(), free_port()
    behind = context.Process(target=replica, args=(replica_port, stop))
    front = context.Process(target=gateway, args=(gateway_port, replica_port, stop))
    behind.start()
    front.start()
    figures: dict[str, dict[str, float]] = {}
    try:
        direct, through = f"http://127.0.0.1:{replica_port}", f"http://127.0.0.1:{gateway_port}"
        wait_up(direct)
        wait_up(through)
        process = psutil.Process(front.pid)
        with httpx.Client() as http:
            for path in ("/generate", "/generate_stream"):
                for _ in range(20):
                    ask(http, direct + path)
                    ask(http, through + path)
                before = sum(process.cpu_times()[:2])
                pairs = [(ask(http, direct + path), ask(http, through + path)) for _ in range(requests)]
                cpu_s = sum(process.cpu_times()[:2]) - before
                first = [t[0] - d[0] for d, t in pairs]
                last = [t[1] - d[1] for d, t in pairs]
                figures[path] = {
                    "added_first_byte_ms_p50": round(statistics.median(first), 2),
                    "added_last_byte_ms_p50": round(statistics.median(last), 2),
                    "added_first_byte_ms_p95": round(statistics.quantiles(first, n=20)[-1], 2),
                    "gateway_cpu_ms_per_request": round(cpu_s / requests * 1e3, 2),
                }
    finally:
        stop.set()
        behind.join(10)
        front.join(10)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
