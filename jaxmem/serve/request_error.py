"""Refusals of requests, as vLLM words them in JSON."""

from http import HTTPStatus
from typing import Any

_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}


class RequestError(Exception):
    """A request that is not answered.

    Args:
        message: one line with the field, the value that came, and what to do.
        status: of the answer.
        param: name of the field that is wrong, if it is one.
    """

    def __init__(
        self,
        message: str,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
    ):
        super().__init__(message)
        self.status, self.param = status, param

    @property
    def body(self) -> dict[str, Any]:
        """The answer's object."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, self.status.phrase),
                "param": self.param,
                "code": self.status.value,
            }
        }
