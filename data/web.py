"""A small HTTP server for one person's page, which trusts nobody else: JSON in, JSON out.

Bound to this machine, it answers only who asks for this machine by name (a page elsewhere whose
name was turned to 127.0.0.1 does not) and from this machine's own page; bound to a network, only
who has the token. Bodies are measured before they are read; a request must arrive, and an answer
leave, within PATIENCE, and nobody waits for another's.
"""

import contextlib
import errno
import io
import ipaddress
import json
import secrets
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from urllib.parse import parse_qsl, urlsplit

PATIENCE = 10.0         # seconds for a whole request to arrive, and for each part of an answer
LIMIT = 64 * 1024       # bytes of a body
CONNECTIONS = 256       # at once; one more is hung up on
FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
                               "connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
                               "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Refused(Exception):
    """A request that gets an error status and a reason, one line that says what to do."""

    def __init__(self, status, reason):
        super().__init__(reason)
        self.status = status


class Patient(io.RawIOBase):
    """Bytes of a socket until a moment: a client that drips has no more time than one that waits.
    """

    def __init__(self, connection):
        self.connection, self.until = connection, 0

    def readable(self):
        return True

    def readinto(self, buffer):
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class Server(ThreadingHTTPServer):
    """files: {path: (file, content type)}. routes: {(method, path): f(fields)}, whose result is
    sent: a dict, or an iterator of dicts as lines that leave as they come.

    OSError if host and port can't be had. `url` is what a browser opens, with the token: not for
    those who ask; `page` is without it.
    """
    daemon_threads, request_queue_size = True, 128
    allow_reuse_port = False    # else two servers may have one port

    def __init__(self, host, port, files, routes, token=""):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.files, self.routes = files, routes
        self.room = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((host, port), Handler)
        bound = ipaddress.ip_address(self.server_address[0])
        self.port, self.everywhere = self.server_address[1], bound.is_unspecified
        name = socket.gethostname() if self.everywhere else host
        self.names = {name.lower(), str(bound)}
        if bound.is_loopback or self.everywhere:
            self.names |= {"localhost", "127.0.0.1", "::1"}
        self.token = token if bound.is_loopback else token or secrets.token_urlsafe(18)
        self.page = (f"http://[{name}]" if ":" in name else f"http://{name}") + f":{self.port}/"
        self.url = self.page + (f"#token={self.token}" if self.token else "")

    def server_bind(self):    # HTTPServer's asks for the host's full name, which may take long
        TCPServer.server_bind(self)

    def known(self, host):
        """Whether a Host header is of this server. A name may be turned to any address (DNS
        rebinding), an address may not.
        """
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port or 80
            if parts.netloc != host or "@" in host or port != self.port:
                return False
            if name in self.names:
                return True
            return self.everywhere and bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def process_request(self, request, address):
        if self.room.acquire(blocking=False):
            super().process_request(request, address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, address):
        try:
            super().process_request_thread(request, address)
        finally:
            self.room.release()

    def handle_error(self, request, address):
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):   # those have just gone
            print(f"a request failed: {type(error).__name__}: {error}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    protocol_version, server_version, sys_version = "HTTP/1.1", "nanoHH", ""
    disable_nagle_algorithm = True
    unread = False          # a body that was not taken in

    def setup(self):
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(Patient(self.connection))

    def handle_one_request(self):
        self.rfile.raw.until = time.monotonic() + PATIENCE
        super().handle_one_request()

    def log_message(self, *args):
        pass

    # ------------------------------------------------------------ requests

    def __getattr__(self, name):
        if name.startswith("do_"):
            return self.serve
        raise AttributeError(name)

    def serve(self):
        """Any request, whatever its method."""
        self.unread = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        try:
            result = self.result()
        except Refused as refused:
            return self.refuse(refused.status, str(refused))
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            full = error.errno in FULL
            reason = "the disk is full: make room and try again" if full else error.strerror
            return self.refuse(507 if full else 500, f"nothing was stored: {reason}")
        except Exception as error:
            self.server.handle_error(None, None)
            return self.refuse(500, f"the server failed ({type(error).__name__}); its terminal "
                                    "says more")
        if isinstance(result, bytes):
            self.reply(200, result, self.server.files[urlsplit(self.path).path][1])
        elif isinstance(result, dict):
            self.reply(200, json.dumps(result).encode())
        else:
            self.stream(result)

    def result(self):
        """What a request gets: a file's bytes, a dict or an iterator. Raises Refused."""
        hosts, server = self.headers.get_all("Host", []), self.server
        if len(hosts) != 1 or not server.known(hosts[0].lower()):
            raise Refused(403, f"this is not the server of that name: open {server.page}")
        if {x.lower() for x in self.headers.get_all("Origin", [])} - {f"http://{hosts[0].lower()}"}:
            raise Refused(403, f"a page from elsewhere may not ask here: open {server.page}")
        try:
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query, keep_blank_values=True, max_num_fields=20))
        except ValueError:
            raise Refused(400, "the address can't be read") from None
        if url.netloc and not server.known(url.netloc.lower()):
            raise Refused(403, f"this is not the server of that name: open {server.page}")
        if self.command not in ("GET", "POST"):
            raise Refused(405, "only GET and POST are answered here")
        if url.path in server.files:
            if self.command != "GET":
                raise Refused(405, "only GET is answered at this address")
            path = server.files[url.path][0]
            if not path.is_file():
                raise Refused(404, f"{path.name} is missing beside the program: fetch it again")
            return path.read_bytes()
        if not {("GET", url.path), ("POST", url.path)} & server.routes.keys():
            raise Refused(404, "no such address")
        if (self.command, url.path) not in server.routes:
            raise Refused(405, "this address is asked by the other of GET and POST")
        told = self.headers.get("X-Token", "").encode(errors="replace")
        if server.token and not secrets.compare_digest(told, server.token.encode()):
            raise Refused(403, "the token is missing or wrong: open the address that the server "
                               "printed, #token=... included")
        return server.routes[self.command, url.path](
            query if self.command == "GET" else self.body())

    def body(self):
        """The JSON object that was sent. Its size is known before a byte of it is read."""
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) != 1 or "Transfer-Encoding" in self.headers:
            raise Refused(411, "a Content-Length is needed, once, and no Transfer-Encoding")
        if not (lengths[0].isascii() and lengths[0].isdigit()):
            raise Refused(400, "Content-Length is not a number")
        if len(lengths[0]) > 9 or int(lengths[0]) > LIMIT:
            raise Refused(413, f"more than {LIMIT} bytes: send less")
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "Content-Type must be application/json")
        data = self.rfile.read(int(lengths[0]))
        self.unread = False
        if len(data) < int(lengths[0]):
            raise ConnectionResetError
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        if not isinstance(fields, dict):
            raise Refused(400, "the body is not a JSON object")
        return fields

    # ------------------------------------------------------------ answers

    def head(self, status, kind, length=None):
        self.connection.settimeout(PATIENCE)
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        if status == 405:
            self.send_header("Allow", "GET, POST")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Connection", "close")   # one a request: an idle one holds a thread
        self.end_headers()

    def reply(self, status, data, kind="application/json"):
        self.head(status, kind, len(data))
        if self.command != "HEAD":
            self.wfile.write(data)

    def stream(self, rows):
        """One JSON line each, as it comes."""
        self.head(200, "application/x-ndjson")
        for row in rows:
            self.connection.settimeout(PATIENCE)
            self.wfile.write(json.dumps(row).encode() + b"\n")

    def refuse(self, status, reason):
        """An error as JSON. A body still on its way is not read, but given a second to end: hanging
        up at once would take the answer away from who is still sending.
        """
        self.reply(status, json.dumps({"error": reason}).encode())
        self.rfile.raw.until, left = time.monotonic() + min(1, PATIENCE), 16 * LIMIT
        with contextlib.suppress(OSError):
            if self.unread:
                self.connection.shutdown(socket.SHUT_WR)
            while self.unread and left > 0 and (data := self.rfile.read1(LIMIT)):
                left -= len(data)

    def send_error(self, code, message=None, explain=None):
        """What the base class says of a request that it can't read."""
        self.request_version = "HTTP/1.1"
        self.command = getattr(self, "command", None)
        self.refuse(int(code), message or "the request can't be read")
