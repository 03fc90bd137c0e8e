"""An upload as OpenAI's clients and browsers send it: multipart/form-data with one file, taken in piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from shoal.gateway.errors import invalid

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 16
MAX_HEADER_BYTES = 4096  # of one part
MAX_VALUE_BYTES = 4096  # of a field that is no file
MAX_FILENAME = 255


class Form:
    """Fields are kept, the bytes of the part `file` are only passed on. Everything raises ApiError for a bad form."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind.lower() != b"multipart/form-data" or not boundary:
            raise invalid("the body must be multipart/form-data with the fields 'file' and 'purpose'")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: no file has come
        self._num_parts = 0
        self._complete = False
        self._content: list[bytes] = []  # of the file, not passed on yet
        self._field: str | None = None  # which the part is; None: the file
        self._value = bytearray()
        self._header, self._header_value = bytearray(), bytearray()
        self._num_header_bytes = 0
        self._disposition: dict[bytes, bytes] = {}
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as e:
            raise invalid(f"the form's boundary cannot be used: {e}") from None

    def feed(self, piece: bytes) -> bytes:
        """What `piece` of the body holds of the file."""
        try:
            self._parser.write(piece)
        except FormParserError as e:
            raise invalid(f"the body is no valid form: {e}") from None
        content = b"".join(self._content)
        self._content.clear()
        return content

    def end(self) -> str:
        """The body is over. The file's name, as its sender calls it."""
        if not self._complete:
            raise invalid("the form ends in the middle")
        if self.filename is None:
            raise invalid("'file' is required", "file")
        return self.filename

    # -- what the parser finds -----------------------------------------------------------------------------------------

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise invalid(f"the form has more than {MAX_PARTS} fields")
        self._num_header_bytes = 0
        self._disposition = {}
        self._value.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header_value += data[start:end]

    def _count_header(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise invalid(f"a field of the form has headers of more than {MAX_HEADER_BYTES} bytes")

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = parse_options_header(bytes(self._header_value))[1]
        self._header.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        name = self._disposition.get(b"name", b"").decode(errors="replace")
        if not name:
            raise invalid("a field of the form has no name")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise invalid(f"'{name[:100]}' is there twice", name[:100])
        if name == "file":
            self._field = None
            given = self._disposition.get(b"filename", b"").decode(errors="replace")
            self.filename = "".join(filter(str.isprintable, given))[:MAX_FILENAME] or "upload"
        else:
            self._field = name

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._content.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_VALUE_BYTES:
            raise invalid(f"'{self._field[:100]}' is longer than {MAX_VALUE_BYTES} bytes", self._field[:100])

    def _on_part_end(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode(errors="replace")

    def _on_end(self) -> None:
        self._complete = True
