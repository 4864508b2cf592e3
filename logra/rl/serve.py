"""The process that `placement.Process` starts: an engine that answers calls on a socket until it is told to stop.

    python -m logra.rl.serve FILE_DESCRIPTOR
"""

import os
import socket
import sys
import traceback

import torch

from logra import sync, wire
from logra.rl.placement import Copy, answer
from logra.rl.rollout import deterministic


def start(engine: str, threads: int, **settings):
    torch.set_num_threads(threads)
    deterministic()
    if engine == "ray":
        from logra.rl.engines import Engines

        return Engines(threads=threads, **settings)
    if engine == "vllm":
        from logra.rl.vllm_rollout import VLLM

        return VLLM(threads=threads, **settings)
    return Copy(**settings)


def serve(stream) -> None:
    """Answer until the stream ends or "stop" is called. A refusal is an answer too; only a stream that makes no sense ends it."""
    engine = None
    while (asked := wire.read(stream)) is not None:
        about = wire.unpack(wire.opened(asked))[1]
        call, arguments = about["call"], about["arguments"]
        message = wire.read(stream) if call in ("apply", "compare") else b""
        try:
            if call == "start":
                engine, body = start(**arguments), wire.pack({}, {})
            elif call == "stop":
                engine.close()
                body = wire.pack({}, {})
            else:
                body = answer(engine, call, arguments, message)
        except sync.SyncError as error:
            body = wire.pack({}, {"reason": error.reason, "detail": error.detail})
        except Exception as error:                          # the trainer has to hear of it, whatever it is
            traceback.print_exc()
            body = wire.pack({}, {"error": f"{type(error).__name__}: {error}"})
        wire.write(stream, wire.seal(body))
        if call == "stop":
            return


def main() -> int:
    with socket.socket(fileno=int(sys.argv[1])) as ours, ours.makefile("rwb") as stream:
        os.set_inheritable(ours.fileno(), False)            # an engine's own workers must not hold the line open
        serve(stream)
    return 0


if __name__ == "__main__":
    sys.exit(main())
