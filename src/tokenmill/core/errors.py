"""Expected failures, one tree. Programmer errors are assertions and are not here.

    TokenmillError
     |- InvalidRequest            400  the caller can mend it; names the field
     |   |- ContextTooLong        400  prompt (+ max_tokens) exceeds what the engine can hold
     |   |- KeyReused             422  an Idempotency-Key that came with another call
     |- AuthenticationFailed      401
     |- Forbidden                 403  a web page that may not call, or a name that is not this server's
     |- ModelNotFound             404
     |- NotFound                  404  nothing is kept under that id, or not any more
     |   |- PreviousResponseNotFound
     |- RequestTimeout            408  it took longer than it may
     |- BodyTooLarge              413
     |- UnsupportedEncoding       415  the body is compressed in a way that is not read
     |- Overloaded                429  a retry after `retry_after_s` may succeed
     |   |- RateLimited            429  the caller has used up what it may
     |- Unavailable               503  the engine is down or draining; a retry may succeed (`retry_after_s`: when)
     |- EngineFailed              500  a step failed; the request was lost
     |- UpstreamFailed            502  a server of others that this one passes calls to gave no whole answer
     |- LinkRefused               the other end of a network link is not who it must be, or does not want this one
     |- ConfigError               exit code 2; names the option
     |   |- Infeasible             each option is known and in its range, but together they cannot be, such as weights
     |   |                         that do not fit into memory
     |- BadCheckpoint             a model file is truncated, corrupt, hostile or of an unknown kind
     |- FetchError                a model could not be obtained; says what to do

Each carries `param` (the field or option at fault, if one is) and `retryable`. How an error is phrased over HTTP or on
the command line is decided where it is shown, from these attributes alone.
"""

from __future__ import annotations

MAX_RETRY_S = 300
"""Clients give up when they are told to come back later than that."""


class TokenmillError(Exception):
    """Base of every expected failure. `message` is one sentence for the user that says what to do."""

    status = 500
    kind = "internal_error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(TokenmillError):
    status = 400
    kind = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    kind = "invalid_request_error"


class KeyReused(InvalidRequest):
    status = 422


class AuthenticationFailed(TokenmillError):
    status = 401
    kind = "authentication_error"


class Forbidden(TokenmillError):
    status = 403
    kind = "permission_error"


class ModelNotFound(TokenmillError):
    """`hint`: what there is instead, if that is known; `name`: what was asked for, if it was a model."""

    status = 404
    kind = "not_found_error"

    def __init__(self, message: str, *, param: str | None = None, name: str = "", hint: str = "") -> None:
        super().__init__(message, param=param)
        self.name = name
        self.hint = hint


class NotFound(TokenmillError):
    status = 404
    kind = "invalid_request_error"


class PreviousResponseNotFound(NotFound):
    pass


class RequestTimeout(TokenmillError):
    status = 408
    kind = "timeout_error"
    retryable = True


class BodyTooLarge(TokenmillError):
    status = 413
    kind = "invalid_request_error"


class UnsupportedEncoding(TokenmillError):
    status = 415
    kind = "invalid_request_error"


class Overloaded(TokenmillError):
    """`reason`: which bound it was, in a word, for metrics."""

    status = 429
    kind = "overloaded_error"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None, reason: str = "") -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s
        self.reason = reason


class RateLimited(Overloaded):
    """`limit`: which; `headers`: what an answer says of the limits."""

    kind = "rate_limit_error"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, limit: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, reason=f"tenant_{limit}")
        self.limit = limit
        self.headers = headers or {}


EXPIRED = "The request could not be started in time."
"""Of an Overloaded: it was let in, and waited longer than it may."""


class Unavailable(TokenmillError):
    status = 503
    kind = "unavailable_error"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float | None = None, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class EngineFailed(TokenmillError):
    status = 500
    kind = "internal_error"
    retryable = True


class UpstreamFailed(TokenmillError):
    status = 502
    kind = "upstream_error"
    retryable = True


class LinkRefused(TokenmillError):
    kind = "link_refused"


class ConfigError(TokenmillError):
    kind = "config_error"


class Infeasible(ConfigError):
    pass


class BadCheckpoint(TokenmillError):
    kind = "bad_checkpoint"


class FetchError(TokenmillError):
    kind = "fetch_error"
    retryable = True
