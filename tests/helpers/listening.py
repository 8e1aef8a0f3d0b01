"""What is logged, kept for a test."""

import logging


class Listening(logging.Handler):
    """Keeps what is logged.

    Attributes:
        told: The messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())
