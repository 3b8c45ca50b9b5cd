"""Regular expressions that are compiled when they're first asked: a run needs few of the hundred that there are, and
compiling all of them would take longer than reading the end of a log (measured: 70 of 110 ms)."""

from __future__ import annotations

import re
from typing import Any, cast


class _Lazy:
    def __init__(self, source: str, flags: int) -> None:
        self.pattern = source
        self.flags = flags

    def __getattr__(self, name: str) -> Any:
        compiled = re.compile(self.pattern, self.flags)
        # from now on the compiled one's own methods: no detour in the hot loops
        for method in ("match", "search", "fullmatch", "finditer", "findall", "split", "sub"):
            self.__dict__[method] = getattr(compiled, method)
        return getattr(compiled, name)


def lazy(source: str, flags: int = 0) -> re.Pattern[str]:
    return cast("re.Pattern[str]", _Lazy(source, flags))
