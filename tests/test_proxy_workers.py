"""Several workers: one port, one admin port, sums that are exact and never go down, whatever dies."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

from proxy.catalogue import REQUESTS
from proxy.counters import Counters, Overview, Present, Report
from sparseety.logreader import find_logs, read_log
from sparseety.records import LogClose, RequestStart, StreamDone
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    WAIT,
    AwaitHangUp,
    RawClient,
    chunk,
    chunked,
    post,
    reply,
    running_upstream,
)
from tests.test_proxy_cli import BANNER, admin_port, get, started, stop

SUM = "sparseety_proxy_requests_total"
ALIVE = "sparseety_proxy_workers_alive"


def total(admin: int, name: str = SUM) -> int:
    """The sum over all labels of one metric."""
    lines = get(admin, "/metrics")[1].decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if re.match(rf"{name}(\{{.*\}})? ", line))


def exchange(port: int, count: int = 1) -> None:
    for _ in range(count):
        with RawClient(port) as client:
            client.send(post(b"{}", b"connection: close"))
            assert client.read_reply()[0] == 200


def until(true, what: str):
    """Wait for something that another process does."""
    deadline = time.monotonic() + WAIT
    while not (found := true()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def log_of_each_worker(folder: Path) -> dict[int, list]:
    """By process id. A torn last line is what a killed process leaves."""
    problems: list[str] = []
    found = {}
    for path in find_logs([str(folder)]):
        found_records = [record for _, record in read_log(path, lambda problem: problems.append(problem.code))]
        found[found_records[0].pid] = found_records
    assert set(problems) <= {"TORN_RECORD"}
    return found


def test_a_thousand_requests_over_four_workers_are_a_thousand_in_each_of_twenty_scrapes(tmp_path):
    flags = ("--workers", "4")
    with (
        running_upstream(reply(b"{}")) as upstream,
        started(tmp_path, upstream.url, *flags) as (process, banner, port),
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        assert "  workers    4 processes\n" in banner
        admin = admin_port(banner)
        assert total(admin) == 0
        for done in [pool.submit(exchange, port, 125) for _ in range(8)]:
            done.result()
        until(lambda: total(admin) == 1000, "a request is not counted")  # each is, a moment after its last byte
        assert [total(admin) for _ in range(20)] == [1000] * 20
        assert total(admin, ALIVE) == 4
        last = stop(process)
    assert process.returncode == 0
    logs = log_of_each_worker(tmp_path / "logs")
    shares = [sum(isinstance(record, RequestStart) for record in records) for records in logs.values()]
    assert (len(shares), sum(shares)) == (4, 1000)
    assert min(shares) > 100  # nobody idles: at even shares each has 250
    written = sum(map(len, logs.values()))
    assert last.endswith(f"Stopped. 1000 requests, 0 of them broken off; {written} records written, 0 lost.\n")
    assert all(isinstance(records[-1], LogClose) for records in logs.values())


def test_a_worker_that_is_killed_is_replaced_and_the_sums_keep_what_it_had_counted(tmp_path):
    with (
        running_upstream(reply(b"{}")) as upstream,
        started(tmp_path, upstream.url, "--workers", "2") as (process, banner, port),
    ):
        admin = admin_port(banner)
        exchange(port, 40)
        until(lambda: total(admin) == 40, "a request is not counted")
        victim = next(iter(log_of_each_worker(tmp_path / "logs")))
        os.kill(victim, signal.SIGKILL)
        assert process.stderr is not None
        said = process.stderr.readline()
        assert re.fullmatch(
            rf"ERROR sparseety\.proxy: worker [12] \(pid {victim}\) has died \(killed by signal 9\); .*\n", said
        )
        exchange(port, 20)  # those that come to the dead worker's socket wait there for its successor
        until(lambda: total(admin) == 60, "a request is not counted")
        seen = []
        until(lambda: seen.append(total(admin)) or total(admin, ALIVE) == 2, "no replacement")
        assert set(seen) == {60}
        assert total(admin, "sparseety_proxy_worker_restarts_total") == 1
        assert get(admin, "/readyz") == (200, b'{"ready":true,"reasons":[]}')
        assert "Stopped. 60 requests, 0 of them broken off" in stop(process)
    assert process.returncode == 0
    assert len(log_of_each_worker(tmp_path / "logs")) == 3


def test_no_scrape_is_lower_than_the_one_before_while_workers_are_killed_under_load(tmp_path):
    stopped = threading.Event()

    def load(port: int) -> None:
        while not stopped.is_set():
            with contextlib.suppress(OSError, AssertionError):  # what a killed worker had open is broken off
                exchange(port)

    with (
        running_upstream(reply(b"{}")) as upstream,
        started(tmp_path, upstream.url, "--workers", "2") as (process, banner, port),
        concurrent.futures.ThreadPoolExecutor(3) as pool,
    ):
        admin = admin_port(banner)
        for _ in range(3):
            pool.submit(load, port)
        try:
            seen = [total(admin) for _ in range(5)]
            for victim in log_of_each_worker(tmp_path / "logs"):
                os.kill(victim, signal.SIGKILL)
                seen += [total(admin) for _ in range(10)]
            until(lambda: total(admin, "sparseety_proxy_worker_restarts_total") == 2, "no replacement")
            until(lambda: total(admin, ALIVE) == 2, "no replacement")
            seen += [total(admin) for _ in range(5)]
        finally:
            stopped.set()
        assert seen == sorted(seen)
        assert seen[-1] > seen[0]
        stop(process)


def test_streams_at_all_workers_are_listed_and_finished_before_the_parent_stops(tmp_path):
    go = threading.Event()
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    with running_upstream(chunked(EVENT_STREAM), chunk(event), go, chunk(b"data: [DONE]\n\n"), LAST_CHUNK) as upstream:
        upstream.scripts[:0] = BANNER
        with (
            started(tmp_path, upstream.url, "--workers", "3") as (process, banner, port),
            contextlib.ExitStack() as stack,
        ):
            clients = [stack.enter_context(RawClient(port)) for _ in range(12)]
            for client in clients:
                client.send(post(b"{}"))
                client.read_until(event)
            streams = json.loads(get(admin_port(banner), "/streams")[1])["streams"]
            assert len({stream["id"] for stream in streams}) == 12
            assert all(stream["bytes"] == len(event) for stream in streams)
            # Ctrl-C reaches the whole process group: the workers leave it to the parent.
            for pid in (process.pid, *log_of_each_worker(tmp_path / "logs")):
                os.kill(pid, signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.readline().startswith("Draining: 12 requests are open.")
            until(lambda: refused(port), "new connections are still taken")
            assert get(admin_port(banner), "/readyz")[0] == 503
            go.set()
            for client in clients:
                assert client.read_to_end().endswith(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
            _, stderr = process.communicate(timeout=WAIT)
    assert process.returncode == 0
    assert stderr.startswith("Stopped. 12 requests, 0 of them broken off")
    logs = log_of_each_worker(tmp_path / "logs")
    endings = [record for records in logs.values() for record in records if isinstance(record, StreamDone)]
    assert [ending.outcome for ending in endings] == ["complete"] * 12


def refused(port: int) -> bool:
    try:
        RawClient(port).socket.close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_second_signal_breaks_off_what_is_open_at_any_worker_and_names_it(tmp_path):
    with running_upstream(chunked(EVENT_STREAM), chunk(b": hi\n\n"), AwaitHangUp) as upstream:
        upstream.scripts[:0] = BANNER
        with started(tmp_path, upstream.url, "--workers", "2") as (process, _, port), RawClient(port) as client:
            client.send(post(b"{}"))
            client.read_until(b": hi\n\n")
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.readline().startswith("Draining: 1 requests are open.")
            stderr = stop(process, signal.SIGINT)
            assert not client.read_to_end().endswith(LAST_CHUNK)
    assert process.returncode == 0
    ids = [
        record.uuid
        for records in log_of_each_worker(tmp_path / "logs").values()
        for record in records
        if isinstance(record, RequestStart)
    ]
    assert stderr.startswith(
        f"Broken off, and incomplete in the log:\n  {ids[0]}   chat, 1 reads, 6 bytes\nStopped. 1 "
    )


def test_workers_whose_parent_is_killed_finish_their_streams_and_end(tmp_path):
    go = threading.Event()
    with running_upstream(chunked(EVENT_STREAM), chunk(b": hi\n\n"), go, LAST_CHUNK) as upstream:
        upstream.scripts[:0] = BANNER
        with started(tmp_path, upstream.url, "--workers", "2") as (process, _, port), RawClient(port) as client:
            workers = list(log_of_each_worker(tmp_path / "logs"))
            client.send(post(b"{}"))
            client.read_until(b": hi\n\n")
            process.kill()
            until(lambda: refused(port), "orphans still take connections")
            go.set()
            assert client.read_to_end().endswith(LAST_CHUNK)
            until(lambda: not any(map(alive, workers)), "an orphan stays")
    logs = log_of_each_worker(tmp_path / "logs")
    assert all(isinstance(records[-1], LogClose) for records in logs.values())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_that_hangs_holds_no_scrape_up_and_its_last_counts_stay(tmp_path):
    with (
        running_upstream(reply(b"{}")) as upstream,
        started(tmp_path, upstream.url, "--workers", "2") as (process, banner, port),
    ):
        admin = admin_port(banner)
        exchange(port, 20)
        until(lambda: total(admin) == 20, "a request is not counted")
        hanging = next(iter(log_of_each_worker(tmp_path / "logs")))
        os.kill(hanging, signal.SIGSTOP)
        try:
            assert total(admin) == 20
        finally:
            os.kill(hanging, signal.SIGCONT)
        assert "Stopped. 20 requests" in stop(process)


def test_modules_of_the_same_names_in_the_folder_it_is_started_in_are_not_taken_for_its_own(tmp_path):
    (tmp_path / "proxy").mkdir()
    (tmp_path / "proxy" / "__init__.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong module')")
    with running_upstream(reply(b"{}")) as upstream:
        command = ("-P", "-m", "proxy.cli")
        with started(tmp_path, upstream.url, "--workers", "2", command=command) as (process, _, port):
            exchange(port)
            stop(process)
    assert process.returncode == 0


def test_of_a_worker_that_has_ended_the_sums_stay_and_the_present_does_not():
    ended, counters = Counters(), Counters()
    ended.add(3, REQUESTS, "m", "chat", "true", "complete")
    counters.add(1, REQUESTS, "m", "chat", "true", "complete")
    overview = Overview([Report(counters, Present(open={"chat": 1}, open_streams=1))], ended, workers=2)
    for _ in range(2):  # adding up changes nothing
        assert overview.counters().total(REQUESTS) == 4
    assert overview.open_by_endpoint() == {"chat": 1, "completions": 0, "responses": 0, "messages": 0, "other": 0}
    assert overview.troubles() == ["1 of 2 workers are down"]
