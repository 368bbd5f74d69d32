"""Downloads, from a real server on this machine that does what servers and networks do."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from mars.lab.errors import LabError
from mars.lab.images import download as module
from mars.lab.images.download import download

CONTENT = np.random.default_rng(0).bytes(1_000_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT; its attributes say how badly."""

    content = CONTENT
    breaks_after: int | None = None  # bytes of a response
    ranges = True
    wrong_range = False
    status: int | None = None  # of the first `failures` answers
    failures = 10**9
    tells_length = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/some/file.tar.gz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        given = self.headers["Range"]
        self.server.asked.append(given)
        if self.server.status is not None and len(self.server.asked) <= self.server.failures:
            self.send_error(self.server.status)
            return
        content, start = self.server.content, 0
        if given and self.server.ranges:
            start = int(given.removeprefix("bytes=").rstrip("-")) + self.server.wrong_range
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if self.server.tells_length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = None if self.server.breaks_after is None else start + self.server.breaks_after
        self.wfile.write(content[start:stop])  # and the connection is closed


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_a_file_arrives_whole(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    download(server.url, tmp_path / "a", MD5, lambda *both: seen.append(both))
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert seen[-1] == (1_000_000, 1_000_000)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    download(server.url, tmp_path / "a", MD5)
    assert len(server.asked) == 1  # it is there: nobody is asked


def test_a_connection_that_breaks_off_is_taken_up_where_it_was(
    server: Server, tmp_path: Path
) -> None:
    server.breaks_after = 300_000
    download(server.url, tmp_path / "a", MD5, wait=0)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_an_interrupted_download_goes_on_from_its_part(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(CONTENT[:123_456])
    download(server.url, tmp_path / "a", MD5)
    assert server.asked == ["bytes=123456-"]
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_an_interrupt_keeps_the_part(server: Server, tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        if done > 500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(server.url, tmp_path / "a", MD5, interrupt)
    part = (tmp_path / "a.part").read_bytes()
    assert 500_000 < len(part) < 1_000_000
    assert CONTENT.startswith(part)


def test_a_part_that_is_whole_needs_no_server(tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(CONTENT)
    download("http://127.0.0.1:9/none", tmp_path / "a", MD5)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_all_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "a.part").write_bytes(b"x" * 1000)
    download(server.url, tmp_path / "a", MD5)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_server_that_does_not_tell_the_length(server: Server, tmp_path: Path) -> None:
    server.tells_length = False
    seen: list[int | None] = []
    download(server.url, tmp_path / "a", MD5, lambda _, total: seen.append(total))
    assert set(seen) == {None}
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_another_part_than_asked_for_is_not_taken(server: Server, tmp_path: Path) -> None:
    server.wrong_range = True
    (tmp_path / "a.part").write_bytes(CONTENT[:1000])
    download(server.url, tmp_path / "a", MD5, wait=0)
    assert server.asked == ["bytes=1000-", None]
    assert (tmp_path / "a").read_bytes() == CONTENT


@pytest.mark.parametrize("before", [0, 1000, 2_000_000])
def test_wrong_bytes_are_not_kept(server: Server, tmp_path: Path, before: int) -> None:
    """Be they the server's, or of a part that was of another file (or longer than this one)."""
    if before:
        (tmp_path / "a.part").write_bytes(b"x" * before)
    else:
        server.content = CONTENT[:-1] + b"?"
    with pytest.raises(LabError, match=r"came with a wrong checksum .*: nothing was kept"):
        download(server.url, tmp_path / "a", MD5)
    assert not list(tmp_path.iterdir())


def test_a_file_in_its_place_with_other_content_is_replaced(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "a").write_bytes(b"an old one")
    download(server.url, tmp_path / "a", MD5)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_what_is_not_there_is_told_at_once(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(LabError, match=r"cannot download http.*: the server says 404 Not Found"):
        download(server.url, tmp_path / "a", MD5)
    assert len(server.asked) == 1
    assert not list(tmp_path.iterdir())


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.status, server.failures = 503, 3
    download(server.url, tmp_path / "a", MD5, wait=0)
    assert len(server.asked) == 4


def test_giving_up_says_what_was_kept_and_what_to_do(server: Server, tmp_path: Path) -> None:
    server.status = 503
    (tmp_path / "a.part").write_bytes(CONTENT[:2000])
    text = r"503 .*, 5 times in a row; 2,000 bytes are kept: run the same command to resume"
    with pytest.raises(LabError, match=text):
        download(server.url, tmp_path / "a", MD5, wait=0)
    assert len(server.asked) == module.RETRIES
    assert (tmp_path / "a.part").read_bytes() == CONTENT[:2000]


def test_no_network_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"cannot download http://127.0.0.1:9/x: .*refused"):
        download("http://127.0.0.1:9/x", tmp_path / "a", MD5, wait=0)
    assert not list(tmp_path.iterdir())


def test_silence_is_a_broken_connection(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts, and never answers
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/a"
        with pytest.raises(LabError, match="timed out"):
            download(url, tmp_path / "a", MD5, wait=0, timeout=0.05)


def test_a_place_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"cannot write .*/missing/a\.part"):
        download(server.url, tmp_path / "missing" / "a", MD5)
