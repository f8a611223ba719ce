"""A server of files on this machine, which counts what it is asked for, and fails as it is told."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server(ThreadingHTTPServer):
    """Serves a folder; ``ranges`` and ``status`` say how it answers, ``stalls`` for what it does not."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, folder):
        self.folder, self.ranges, self.status, self.stalls = str(folder), True, 200, ()
        self.lock, self.sent, self.asked, self.over = threading.Lock(), 0, [], threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Clients that go away are usual here."""


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, request, client_address, server):
        super().__init__(request, client_address, server, directory=server.folder)

    def log_message(self, *args):
        pass

    def end_headers(self):
        self.send_header("ETag", f'"{self.tag}"')
        super().end_headers()

    def send_head(self):
        path, self.tag = Path(self.translate_path(self.path)), "none"
        with self.server.lock:
            self.server.asked.append((self.command, self.path, self.headers.get("Range")))
        if any(one in self.path for one in self.server.stalls):
            self.server.over.wait(60)
        if self.server.status != 200:
            self.send_error(self.server.status)
            return None
        if not path.is_file():
            return super().send_head()
        self.tag = path.stat().st_mtime_ns
        asked = self.headers.get("Range") if self.server.ranges else None
        if asked is None:
            return super().send_head()
        nbytes = path.stat().st_size
        start, _, stop = asked.removeprefix("bytes=").partition("-")
        first = int(start) if start else nbytes - int(stop)
        last = min(int(stop), nbytes - 1) if start and stop else nbytes - 1
        if first > last:
            self.send_error(416)
            return None
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{nbytes}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        self.left = last - first + 1
        file = path.open("rb")
        file.seek(first)
        return file

    def copyfile(self, source, outputfile):
        data = source.read(getattr(self, "left", -1))
        self.__dict__.pop("left", None)
        with self.server.lock:
            self.server.sent += len(data)
        outputfile.write(data)


@contextmanager
def serving(folder):
    """A server of a folder, which ends with the context."""
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
