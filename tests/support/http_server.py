"""An HTTP server of a test's own, in threads: one function answers every request."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def http_server(answer):
    """The address of a server on this host.

    ``answer(request, text)``: the status and the bytes of an answer, or None: the connection ends without one.
    ``request`` is http.server's handler (``command``, ``path``, ``connection``), ``text`` what came with it.
    """

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self):
            answered = answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            if answered is None:
                return
            status, data = answered
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = handle_any

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # connections that wait, from all threads of all ranks

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
