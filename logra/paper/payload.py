"""What synchronisation sends and how long it takes: an update's message against full bfloat16 weights of the same matrices.

    python -m logra.paper.payload [--json]      bytes, at the shapes of the paper's models

The messages are made, not estimated: `logra.wire` writes updates of the right shapes (their content does not matter to their size).
"""

import argparse
import json
import socket
import sys
import threading
import time

import torch

import logra
from logra import sync, wire
from logra.rl.placement import Copy, base_model
from logra.update import LowRankUpdate, MatrixUpdate

# d × k of every matrix that is selected, from the published model configurations; 27B counts its self-attention and its linear-attention layers
SHAPES = {
    "1.5B": [(28, {"q": (1536, 1536), "k": (256, 1536), "v": (256, 1536), "o": (1536, 1536), "gate": (8960, 1536), "up": (8960, 1536), "down": (1536, 8960)})],
    "7B": [(28, {"q": (3584, 3584), "k": (512, 3584), "v": (512, 3584), "o": (3584, 3584), "gate": (18944, 3584), "up": (18944, 3584), "down": (3584, 18944)})],
    "27B": [(16, {"q": (12288, 5120), "k": (1024, 5120), "v": (1024, 5120), "o": (5120, 6144), "gate": (17408, 5120), "up": (17408, 5120), "down": (5120, 17408)}),
            (48, {"qkv": (10240, 5120), "z": (6144, 5120), "out": (5120, 6144), "gate": (17408, 5120), "up": (17408, 5120), "down": (5120, 17408)})],
}


def matrices(model: str) -> dict[str, tuple[int, int]]:
    named = {}
    for layers, shapes in SHAPES[model]:
        named |= {f"model.layers.{len(named) // 7 + layer:02d}.group{layers}.{name}_proj": shape for layer in range(layers) for name, shape in shapes.items()}
    return named


def message_bytes(model: str, rank: int, bits: int) -> int:
    """The size of one message, with one factor's memory shared by all matrices of a shape."""
    dtype = {8: torch.int8, 16: torch.int16}[bits]
    made, whole = {}, matrices(model)
    for name, (d, k) in whole.items():
        made[name] = MatrixUpdate(torch.zeros(d, rank, dtype=dtype), torch.zeros(d, dtype=torch.int16), k, (1 << 63) - 1)
    update = LowRankUpdate(100, "rademacher", rank, bits, made, "0" * 12, "0" * 32, 10 ** 18, dict.fromkeys(made, (1 << 64) - 1))
    return len(wire.encode(update))


def table(ranks=(4, 16, 64, 256), widths=(8, 16)) -> list[dict]:
    rows = []
    for model in SHAPES:
        full = 2 * sum(d * k for d, k in matrices(model).values())
        for rank in ranks:
            for bits in widths:
                size = message_bytes(model, rank, bits)
                rows.append({"model": model, "rank": rank, "bits": bits, "message_bytes": size, "full_bfloat16_bytes": full, "ratio": full / size})
    return rows


def timings(model: str, rank: int, repeats: int = 3) -> list[dict]:
    """Seconds to encode, send over loopback (TCP) and apply one update, and full weights instead, for a real model on this machine; best of some.

    Rows: mode ("exact", "lossy", "full bfloat16"), bytes, encode, send, apply. The update has the trainer's own sizes, from random sketches.
    """
    trainer, _ = base_model(model)
    sketches = logra.attach(trainer, rank)
    optimizer = logra.SketchSGD(sketches, relative_step=6e-5)
    rows = []
    for mode in ("exact", "lossy", "full"):
        receiver = Copy(model, mode, "bfloat16").receiver
        receiver.apply(sync.full_weights(trainer))
        best: dict[str, float] = {}
        for _ in range(repeats):
            for sketch in sketches.values():
                sketch.S_dr.normal_()
            update = optimizer.step()
            began = time.perf_counter()
            message = sync.full_weights(trainer, torch.bfloat16) if mode == "full" else update.to_bytes()
            encoded = time.perf_counter()
            arrived = _over_loopback(message)
            sent = time.perf_counter()
            receiver.apply(arrived)
            seconds = {"encode": encoded - began, "send": sent - encoded, "apply": time.perf_counter() - sent}
            best = {part: min(value, best.get(part, value)) for part, value in seconds.items()}
        rows.append({"mode": "full bfloat16" if mode == "full" else mode, "bytes": len(message), **best})
    return rows


def _over_loopback(message: bytes) -> bytes:
    with socket.create_server(("127.0.0.1", 0)) as server:
        def send():
            with socket.create_connection(server.getsockname()) as line, line.makefile("wb") as stream:
                wire.write(stream, message)

        thread = threading.Thread(target=send)
        thread.start()
        with server.accept()[0] as line, line.makefile("rb") as stream:
            arrived = wire.read(stream)
        thread.join()
    return arrived


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    rows = table()
    if parser.parse_args().json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(f"{row['model']:>5}  rank {row['rank']:>3}  {row['bits']:>2} bits  {row['message_bytes'] / 2**20:9.1f} MiB of {row['full_bfloat16_bytes'] / 2**20:9.1f}: 1/{row['ratio']:.1f}")
    ratio = {(row["model"], row["rank"], row["bits"]): row["ratio"] for row in rows}
    return 0 if ratio["7B", 256, 8] >= 35 and ratio["7B", 64, 8] >= 140 else 1


if __name__ == "__main__":
    sys.exit(main())
