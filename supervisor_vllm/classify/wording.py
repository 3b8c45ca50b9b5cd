"""Where in a line an error can begin, and the words that say that something died but not of what.

The root cause is always the first error in time (worker, then EngineCore, then APIServer); what comes after it are
wrappers, and the noise of everything else falling over.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..lazy import lazy

# Besides exceptions, what may be an error though it is indented: C++, pydantic, exception groups, kubectl describe.
_INDENTED_ERRORS = ("what():", "Value error, ", "| ", "Reason:", "reason:")

_EXCEPTION_HEAD = lazy(r"[A-Za-z_][\w.]{0,120}(?:\([\w.]{0,80}\))?")
# Classes of C libraries' bindings begin in lower case (nixlBackendError, ncclSystemError).
_BINDINGS_CLASS = lazy(r"[a-z]{2,12}[A-Z]\w{0,80}")
# repr() of an exception (V0's engine.py), and V0's word for what a worker raised.
_REPR = lazy(r"([A-Z]\w{2,60}(?:Error|Exception))\((['\"])(.{1,4000})\2,?\)")
_WORKER_RAISED = lazy(r"Exception in worker \w{1,60} while processing method \w{1,80}: ")
_EXCEPTION_WORDS = ("Error", "Exception", "Interrupt", "Exit", "Timeout", "OutOfResources", "Failure", "NotFound")

# What stands in front of the real message, in the same line.
_LEAD_IN = lazy(
    r"(?:[A-Z]\w{2,60}(?:Error|Exception)\(['\"]"  # repr(), V0's engine.py
    r"|Worker failed with error ['\"]"  # v1/executor/multiproc_executor.py
    r"|EngineCore (?:hit an exception|failed to start|encountered a fatal error)[:.] "
    r"|Exception in worker \w{1,60} while processing method \w{1,80}: "  # V0, multiproc_worker_utils.py
    r"|Error executing method [\w']{1,80}\. (?:This might cause deadlock in distributed execution\.)? ?"
    r"|terminate called after throwing an instance of '[\w:]{1,80}'$"
    r"|what\(\): {1,4}"
    r"|(?:Last|Value|Assertion|Runtime|Unexpected|Caught|Fatal|Internal) [Ee]rror[:,] ?"
    r"|Error in model execution(?: \(input dumped to [^)]{1,300}\))?: "  # worker/model_runner_base.py, 0.6
    r"|Error in (?!preprocessing)[\w ]{1,40}: "
    r"|[Ee]rror: |ERROR: |Failed: |FAILED: |Exception: |[Cc]aused by: "
    r"|[\w.:/\[\] -]{0,200}\bNCCL WARN "
    r"|E {2,8}"
    r"|\+-\+-{1,40} \d{1,4} -{1,40}$)"
)

# Exceptions that only pass on that something else failed (v1/engine, v1/executor, engine/multiprocessing of V0).
_WRAPPER = lazy(
    r"(?:EngineCore encountered an issue|Engine core initialization failed|Engine process failed to start"
    r"|WorkerProc initialization failed|cancelled$|Executor failed|Engine core process|Worker failed with error"
    r"|.{0,120}died unexpectedly|Background loop (?:has errored|is stopped|is not running)|Engine loop is not running"
    r"|Got fatal signal from worker|terminated$|MQLLMEngine (?:terminated|is already dead)|Task finished unexpectedly"
    r"|The actor (?:died|is dead)|Failed core proc|Process .{1,80} (?:died|exited) with"
    r"|.{0,60}stack trace (?:above )?for"
    r"|Exceptions? raised in worker|Engine is dead|AsyncEngine is dead|Unhandled error in engine)"
)
_WRAPPER_CLASSES = frozenset(
    {
        "ActorDiedError",
        "ActorUnavailableError",
        "AsyncEngineDeadError",
        "CancelledError",
        "ChildProcessError",
        "EngineDeadError",
        "GeneratorExit",
        "KeyboardInterrupt",
        "MQEngineDeadError",
        "ProcessExitedException",
        "ProcessRaisedException",
        "RayActorError",
        "StopAsyncIteration",
        "StopIteration",
        "SystemExit",
    }
)
# What the others say when a process of theirs is gone.
_ECHO_CLASSES = frozenset(
    {
        "Again",
        "BrokenPipeError",
        "ClientDisconnect",
        "ClosedResourceError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "ContextTerminated",
        "DistNetworkError",
        "EOFError",
        "EndOfStream",
        "IncompleteReadError",
        "RemoteDisconnected",
        "ServerDisconnectedError",
        "WouldBlock",
        "ZMQError",
        "ncclInternalError",
        "ncclRemoteError",
        "ncclSystemError",
    }
)
_ECHO = lazy(
    r".{0,300}(?:Connection (?:closed|reset) by (?:remote )?peer|[Bb]roken pipe|remote process exited or there was a"
    r" network error|Socket closed|Connection refused)"
)

# A process of the tree is gone (as V0, V1 and Ray say it), with its exit code where one stands.
_DEATH = lazy(
    r"(?:.{0,160}\bdied unexpectedly|\[shutdown\] MPClient: engine core exited unexpectedly"
    r"|Worker \S{1,80} pid \d{1,10} died|.{0,80}\bdied with exit code"
    r"|.{0,200}Failed core proc\(s\): \{[^{}]{0,200}-\d|.{0,120}The actor is dead because its worker process has died"
    r"|Process \S{1,80} \(PID: \d{1,10}\) died)"
)
_DEATH_CODE = lazy(r"(?:exit ?code:? |'[\w-]{1,40}': )(-?)(\d{1,3})\b")

# The engine itself says that it is finished: what stands at it is no mere failed request.
_FATAL = lazy(
    r"(?:EngineCore (?:encountered a fatal error|encountered an issue|failed to start|hit an exception)"
    r"|WorkerProc (?:hit an exception|failed to start)|AsyncLLM output_handler failed|Engine background task failed"
    r"|Got fatal signal from worker|Engine core initialization failed|Engine process failed to start"
    r"|Engine loop is not running|Background loop has errored|Exception in worker \w{1,60} while processing"
    r"|Error executing method |MQLLMEngine is already dead)"
)

_START_FAILURE = lazy(
    r"(?:EngineCore failed to start|WorkerProc failed to start|(?:RuntimeError: )?Engine core initialization failed"
    r"|(?:RuntimeError: )?Engine process failed to start)"
)
# run_engine_core (v1/engine/core.py, 0.8.5 on) says this of an engine that was up, "failed to start" of the others.
_SERVING = lazy(
    r"(?:EngineCore encountered a fatal error|AsyncLLM output_handler failed|MQLLMEngine is already dead"
    r"|Engine background task failed)"
)
_METHOD = lazy(r"(?:Error executing method |Exception in worker \w{1,60} while processing method )")

_SHELL_KILL = lazy(r"Killed|(?:[\w./-]{1,120}: line \d{1,6}: )?\d{1,10} Killed .{0,400}|z?sh: killed .{0,400}")

# Somebody asked for the end: vLLM's and uvicorn's words (0.18 on: "[shutdown]").
_STOP = lazy(
    # not EngineCore's own "[shutdown] … trigger received signal": alone it is a signal to that one process (measured)
    r"(?:\[shutdown\] API server: shutdown triggered"
    r"|KeyboardInterrupt(?:: (?:terminated|MQLLMEngine terminated))?$|[Rr]eceived (?:signal )?SIG(?:TERM|INT)\b"
    r"|Received signal (?:2|15)\b|Gracefully stopping http server)"
)
# uvicorn and the launcher say these also after the engine's death.
_SOFT_STOP = lazy(
    r"(?:Shutting down(?: FastAPI HTTP server\.?)?$|Finished server process \[|Application shutdown complete)"
)

#: In an error line of a request, the words may be the user's.
_USER_TEXT = lazy(r"\b(?:[Pp]rompt|messages?=|content|[Rr]equest|input_text|chat[ _]template|tool_call)")

# A file's traceback frame: Python's own, and the short form of reports.
_FRAME = lazy(r'\s{0,12}(?:File "?)?([^\s"]{1,300}\.(?:pyx?|cuh?|cpp))(?:", line |:)\d{1,7}, in (\S{1,120})')


def exception_head(text: str) -> tuple[str, str] | None:
    """(class without its module, message) where the text begins as an exception does."""
    if match := _REPR.fullmatch(text):
        return match[1], match[3]
    if match := _WORKER_RAISED.match(text):
        return "WorkerException", text[match.end() :].strip()
    head, colon, message = text.partition(": ")
    if not colon:
        head = text.rstrip(":").rstrip()
    if len(head) > 220 or not _EXCEPTION_HEAD.fullmatch(head):
        return None
    name = head.partition("(")[0].rpartition(".")[2]
    if not (name[:1].isupper() or _BINDINGS_CLASS.fullmatch(name)) or not name.endswith(_EXCEPTION_WORDS):
        return None
    return name, message.strip()


def readings(body: str) -> Iterator[str]:
    """The body, and what is left of it without the exception's class and other lead-ins: an error begins at one."""
    if body[:1].isspace():
        body = body.strip()
        if not (exception_head(body) and ": " in body) and not body.startswith(_INDENTED_ERRORS):
            return  # a traceback's source line: its words are the code's, not the error's
    text = body.removeprefix("| ").strip()
    for _ in range(6):
        yield text
        if head := exception_head(text):
            text = head[1]
        elif match := _LEAD_IN.match(text):
            text = text[match.end() :].strip()
        else:
            return
        if not text:
            return


def is_wrapper(name: str, message: str) -> bool:
    return name in _WRAPPER_CLASSES or bool(_WRAPPER.match(message))


def is_echo(name: str, message: str) -> bool:
    return name in _ECHO_CLASSES or bool(_ECHO.match(message))


def is_death(body: str) -> bool:
    return bool(_DEATH.match(body))


def death_code(body: str) -> tuple[int | None, int | None]:
    """(signal, exit status) that ended a child, where vLLM prints Python's exit code: -9 is a signal, 1 is none."""
    match = _DEATH_CODE.search(body)
    if match is None:
        return None, None
    code = int(match[2])
    if match[1]:
        return code, None
    return (code - 128, None) if 128 < code < 160 else (None, code)


def is_start_failure(body: str) -> bool:
    """The engine never came up."""
    return bool(_START_FAILURE.match(body))


def method_context(body: str) -> bool:
    """The line above a worker's traceback that names the method that it was in (V0, Ray)."""
    return bool(_METHOD.match(body))


def proves_serving(body: str) -> bool:
    """The engine was up when this was written: the word for an error in its loop, not in its start."""
    return bool(_SERVING.match(body))


def is_fatal(body: str) -> bool:
    return bool(_FATAL.match(body)) or bool((head := exception_head(body)) and (_FATAL.match(head[1])))


def is_shell_kill(body: str) -> bool:
    """The shell's word for a child that got SIGKILL; it doesn't know from whom."""
    return bool(_SHELL_KILL.fullmatch(body.strip()))


def is_stop(body: str) -> bool:
    return bool(_STOP.match(body))


def is_core_signal(body: str) -> bool:
    """EngineCore got a signal. With the API server's own word before it, it's a shutdown; alone, somebody sent it to
    that process only (0.27 on, measured; #50067)."""
    return body.startswith("[shutdown] EngineCore: trigger received signal=")


def is_soft_stop(body: str) -> bool:
    return bool(_SOFT_STOP.match(body))


def may_be_users_text(body: str) -> bool:
    return bool(_USER_TEXT.search(body))


def is_flat_traceback(body: str) -> bool:
    """A whole traceback in one line, as some log collectors write it."""
    return body.startswith("Traceback (most recent call last): ")


def frame(body: str) -> tuple[str, str] | None:
    """(file, function) of a traceback's frame."""
    match = _FRAME.match(body)
    return (match[1], match[2]) if match else None
