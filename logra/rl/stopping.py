"""When a run ends before its last update: a wall-clock limit or a signal, after which it goes on later, and numbers that are not finite.

| exit code | what |
|---|---|
| 75 | stopped with a checkpoint, from which --resume goes on |
| 65 | three updates in a row met a loss, a sketch or a predicted KL that is not finite |
| 130 | Ctrl-C |

torchrun returns 1 for each of them; `stopped.json` in the run's folder says which it was.
"""

import re
import signal
import time

GO_ON, NOT_FINITE = 75, 65                                  # as sysexits.h has them: EX_TEMPFAIL, EX_DATAERR
BAD_IN_A_ROW = 3


class Stopped(Exception):
    """A run that ended before its last update, with a checkpoint. code: for the process to exit with."""

    def __init__(self, code: int, why: str, update: int):
        super().__init__(f"stopped after update {update}: {why}")
        self.code, self.why, self.update = code, why, update


class Limit:
    """Says when a run has to stop. seconds: from now on; None without a limit."""

    def __init__(self, seconds: float | None = None):
        self.until = None if seconds is None else time.monotonic() + seconds
        self.signal: signal.Signals | None = None

    def listen(self) -> "Limit":
        """From now on SIGTERM and SIGUSR1 (Slurm's --signal) end the run after the update that it is in."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._heard)
        return self

    def _heard(self, number, frame) -> None:
        self.signal = signal.Signals(number)

    def reached(self, longest: float) -> str:
        """Why the next update should not be begun, or nothing. longest: seconds that one may take, with evaluation and checkpoint."""
        if self.signal is not None:
            return f"{self.signal.name} was received"
        if self.until is not None and time.monotonic() + longest > self.until:
            return f"the wall-clock limit leaves no time for another update, of up to {longest:.0f} s"
        return ""


def seconds(text: str) -> float:
    """Of a duration as Slurm writes it: MM:SS, HH:MM:SS or D-HH:MM:SS; or a number of seconds. Raises ValueError for another."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if match:
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    raise ValueError(f"{text!r} is no duration: wanted seconds, MM:SS, HH:MM:SS or D-HH:MM:SS, for instance 3:50:00")
