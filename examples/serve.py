"""Serving: train a click model, publish it, answer over HTTP in a process without JAX, and update it meanwhile.

    python examples/serve.py                      # a synthetic click log
    python examples/serve.py --data train.txt.gz  # a log in the Criteo format
    python examples/serve.py --out FOLDER         # keeps the releases and checkpoints
    python examples/serve.py --serve FOLDER/releases    # only the server of such releases, until Ctrl-C; it waits for
                                                        # the first one

Three processes: this one trains, saves deltas (`kvjax.checkpoint.save`, with the cursor "serving") and publishes each
as a release (`kvjax.serving.Releases.follow`); the server is uvicorn with an ASGI app that has NumPy, frozen tables and
the dense parameters, and no JAX; the third has the tables of the last delta and the exported program (`kvjax.export`),
and no model. Each answer says its release and is held against what the trained model says of it, so an answer that
mixed two releases would end this with an error.
"""

import argparse
import asyncio
import contextlib
import functools
import http.client
import io
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from arguments import parsed, positive

from kvjax.serving import FrozenError, FrozenTable, Release, Releases

DIM, WIDTH, PROBE = 16, 32, 64
PAD = -1
"""The key of a category that is missing, which is padding."""
ASKED = '{"keys": [[...]], "dense": [[...]]}, each with n lists, of integers and of 13 numbers'


# ---- the server: NumPy alone -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def layers_of(data: bytes) -> dict[str, np.ndarray]:
    return dict(np.load(io.BytesIO(data)))


def predict(release: Release, keys: Any, dense: Any) -> np.ndarray:
    """Click probabilities ``(n,)`` of keys ``(n, 26)``, some of them `PAD`, and dense features ``(n, 13)``."""
    layers = layers_of(release.files["dense.npz"])
    x = np.concatenate([release["ads"].lookup_bag(keys, pad_id=PAD), np.asarray(dense, np.float32)], 1)
    x = np.maximum(x @ layers["kernel0"] + layers["bias0"], 0)
    return 1 / (1 + np.exp(-(x @ layers["kernel1"] + layers["bias1"])[:, 0]))


class Server:
    """An ASGI application: POST {"keys": [[...]], "dense": [[...]]} gives {"release": 1, "p": [...]}, and GET /metrics
    what Prometheus reads. Of several processes, each has its own."""

    def __init__(self, releases: Releases) -> None:
        self.releases, self.refreshed, self.failure = releases, 0.0, ""
        self.counts = Counter[str](kvjax_failed_refreshes_total=0)

    def refresh(self) -> None:
        """Opens the newest release; requests have the one of before until it is open, and if it cannot be opened."""
        try:
            self.releases.refresh()
            self.refreshed, self.failure = time.time(), ""
        except (FrozenError, OSError) as error:
            self.counts["kvjax_failed_refreshes_total"] += 1
            if str(error) != self.failure:  # once, though it may last
                print(error, file=sys.stderr, flush=True)
            self.failure = str(error)

    def refresh_always(self) -> None:
        while True:
            self.refresh()
            time.sleep(0.05)

    def answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            asked = json.loads(body)
            release = self.releases.current()  # one for the whole request
            p = predict(release, asked["keys"], asked["dense"])
        except FrozenError as error:  # there is none yet
            return 503, {"error": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            return 400, {"error": f"want {ASKED}, got something else: {error}"}
        valid = np.array(asked["keys"]) != PAD
        self.counts["kvjax_keys_total"] += int(valid.sum())
        self.counts["kvjax_missing_keys_total"] += int((valid & ~release["ads"].contains(asked["keys"])).sum())
        return 200, {"release": release.number, "p": p.tolist()}

    def metrics(self) -> str:
        found: dict[str, float] = {"kvjax_refreshed_timestamp_seconds": self.refreshed}
        with contextlib.suppress(FrozenError):  # there is none yet
            release = self.releases.current()
            found["kvjax_release"] = release.number
            found["kvjax_release_published_timestamp_seconds"] = release.info.published.timestamp()
            for name, table in release.items():
                label = json.dumps(name, ensure_ascii=False)  # a string of Prometheus has the same escapes
                found[f"kvjax_table_step{{table={label}}}"] = table.step
                found[f"kvjax_rows{{table={label}}}"] = len(table)
        return "".join(f"{name} {value}\n" for name, value in (found | self.counts).items())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/metrics":
            status, kind, data = 200, b"text/plain; version=0.0.4", self.metrics()
        else:
            status, answer = self.answer(body)
            kind, data = b"application/json", json.dumps(answer)
            self.counts[f'kvjax_requests_total{{status="{status}"}}'] += 1
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": data.encode()})


def serve(folder: Path) -> None:
    import uvicorn

    assert "jax" not in sys.modules
    server = Server(Releases(folder))
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does it for its own sockets alone
    print(f"answers at http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    threading.Thread(target=server.refresh_always, daemon=True).start()  # or all requests wait for what it reads
    config = uvicorn.Config(server, log_level="warning", lifespan="off")
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        asyncio.run(uvicorn.Server(config).serve(sockets=[sock]))


# ---- the third process: tables and a program, no model -----------------------------------------------------------


def run_program(folder: Path, batches: int) -> None:
    import kvjax

    kvjax.checkpoint.restore(folder / "checkpoints")  # the last delta, and what it builds on
    program = kvjax.Program.deserialize((folder / "program").read_bytes())
    probe = np.load(folder / "probe.npz")
    params = params_of(np.load(folder / "params.npz"))
    seconds = []
    for i in range(-3, batches):  # the first ones compile
        started = time.perf_counter()
        p = np.asarray(program(params, kvjax.keys(probe["keys"]), probe["dense"]))
        if i >= 0:
            seconds.append(time.perf_counter() - started)
    np.testing.assert_allclose(p, probe["want"], rtol=1e-4)
    print(json.dumps(seconds), flush=True)


def params_of(layers: Any) -> dict[str, Any]:
    """The dense parameters as Flax has them."""
    return {"params": {f"Dense_{i}": {k: layers[f"{k}{i}"] for k in ("kernel", "bias")} for i in (0, 1)}}


# ---- training ----------------------------------------------------------------------------------------------------


class Trainer:
    """The model, its state, and what of it is published."""

    def __init__(self, args: argparse.Namespace) -> None:
        import criteo
        import flax.linen as nn
        import jax
        import jax.numpy as jnp
        import optax
        from flax.training.train_state import TrainState

        import kvjax

        class Net(nn.Module):
            @nn.compact
            def __call__(self, keys: Any, dense: jax.Array) -> jax.Array:
                ads = kvjax.flax.EmbedBag("ads", DIM, pad_id=PAD, initializer=kvjax.initializers.normal(0.01))
                x = nn.relu(nn.Dense(WIDTH)(jnp.concatenate([ads(keys), dense], 1)))
                return nn.Dense(1)(x)[:, 0]

        def step(state: Any, keys: Any, dense: Any, label: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                return optax.sigmoid_binary_cross_entropy(state.apply_fn(params, keys, dense), label).mean()

            value, grads = kvjax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value

        self.kvjax, self.criteo = kvjax, criteo
        log = criteo.File(args.data) if args.data else criteo.planted(args.rows, 0)[0]
        if len(log) < args.batch:
            raise criteo.FormatError(f"want {args.batch} rows or more (see --batch), {len(log)} are there")
        whole = len(log) // args.batch * args.batch
        passes = (log.batches(0, whole, args.batch) for _ in itertools.count())
        self.batches = itertools.chain.from_iterable(passes)  # a file is read on, not anew for each batch
        self.net, self.step = Net(), jax.jit(step)
        self.score = jax.jit(lambda params, keys, dense: jax.nn.sigmoid(self.net.apply(params, keys, dense)))
        self.probe = self._of(next(log.batches(0, PROBE, PROBE)))[:2]
        params = self.net.init(jax.random.key(0), kvjax.keys(self.probe[0]), self.probe[1])
        rows = optax.chain(optax.scale(args.batch), optax.adagrad(0.05))  # for the loss is a mean, see examples/ctr.py
        tx = kvjax.optax.partition(dense=optax.adam(1e-2), tables=rows)
        self.state = TrainState.create(apply_fn=self.net.apply, params=params, tx=tx)

    def _of(self, rows: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys of columns, which share a table by salts, dense features and labels."""
        keys = self.kvjax.hash_keys(rows.cats, salt=np.arange(self.criteo.CATS))
        keys = np.where(rows.cats == self.criteo.NO_CATEGORY, PAD, keys)
        if rows.label is None:
            raise self.criteo.FormatError("want a log with labels to train on, this one has none")
        return keys, self.criteo.log_dense(rows.dense), rows.label

    def train(self, steps: int) -> float:
        """Trains and gives the last loss."""
        from rich.progress import track

        loss = 0.0
        for _ in track(range(steps), "train"):
            keys, dense, label = self._of(next(self.batches))
            self.state, loss = self.step(self.state, self.kvjax.keys(keys), dense, label)
        return float(loss)

    @property
    def table(self) -> Any:
        return self.state.params["params"]["EmbedBag_0"]["table"]

    def layers(self) -> dict[str, np.ndarray]:
        dense = self.state.params["params"]
        return {f"{k}{i}": np.asarray(dense[f"Dense_{i}"][k]) for i in (0, 1) for k in ("kernel", "bias")}

    def files(self) -> dict[str, bytes]:
        data = io.BytesIO()
        np.savez(data, **self.layers())
        return {"dense.npz": data.getvalue()}

    def want(self) -> np.ndarray:
        """What the model says of the probe now."""
        return np.asarray(self.score(self.state.params, self.kvjax.keys(self.probe[0]), self.probe[1]))

    def save(self, folder: Path, number: int) -> None:
        """The tables as a checkpoint: the first whole, the others what has changed since the one before."""
        since = {"cursor": "serving"} if number == 0 else {"since": "serving"}
        self.kvjax.checkpoint.save(folder / "checkpoints" / str(number), {"ads": self.table}, **since)

    def export(self, folder: Path) -> None:
        """The model as a program, and what it says of the probe, for the third process."""
        kvjax = self.kvjax
        keys, dense = kvjax.keys(self.probe[0]), self.probe[1]
        program = kvjax.export(self.score, self.state.params, keys, dense, shapes=(None, "b, ...", "b, ..."))
        (folder / "program").write_bytes(program.serialize())
        np.savez(folder / "probe.npz", keys=self.probe[0], dense=dense, want=self.want())
        np.savez(folder / "params.npz", **self.layers())


# ---- the load ----------------------------------------------------------------------------------------------------


class Load(threading.Thread):
    """Asks the server for the probe again and again, and checks each answer against its release."""

    def __init__(self, port: int, probe: Any, want: dict[int, np.ndarray], slack: dict[str, float]) -> None:
        super().__init__()
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.connection.connect()
        # The head and the body of a request are two segments, of which the second would wait for the first.
        self.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.body = json.dumps({"keys": probe[0].tolist(), "dense": probe[1].tolist()})
        self.want, self.seconds, self.releases, self.error = want, [], set[int](), None
        self.done, self.slack = threading.Event(), slack

    def run(self) -> None:
        try:
            while not self.done.is_set():
                started = time.perf_counter()
                self.connection.request("POST", "/", self.body)
                answer = json.loads(self.connection.getresponse().read())
                self.seconds.append(time.perf_counter() - started)
                np.testing.assert_allclose(answer["p"], self.want[answer["release"]], **self.slack)
                self.releases.add(answer["release"])
        except Exception as error:
            self.error = error


def report(results: dict[str, tuple[list[float], int]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "ms, p50", "ms, p99", "keys/s", title=f"{PROBE} examples of 26 keys a request")
    for name, (seconds, keys) in results.items():
        p50, p99 = np.percentile(seconds, [50, 99])
        table.add_row(name, f"{1e3 * p50:.3f}", f"{1e3 * p99:.3f}", f"{keys / p50:,.0f}")
    Console().print(table)


def timed(frozen: FrozenTable, keys: np.ndarray, n: int) -> list[float]:
    seconds = []
    for _ in range(n):
        started = time.perf_counter()
        frozen.lookup(keys)
        seconds.append(time.perf_counter() - started)
    return seconds


def run(args: argparse.Namespace, folder: Path) -> None:
    trainer, releases = Trainer(args), Releases(folder / "releases")
    print(f"loss {trainer.train(args.steps):.4f}, {len(trainer.table):,} rows")
    trainer.save(folder, 0)
    first = releases.follow(folder / "checkpoints", trainer.files(), quantise=args.quantise)
    want = {first.number: trainer.want()}

    me = [sys.executable, __file__]
    server = subprocess.Popen([*me, "--serve", str(releases.path)], stdout=subprocess.PIPE, text=True)
    try:
        port = int(server.stdout.readline().rpartition(":")[2])
        # What is stored in fewer bits answers a little else.
        slack = {"rtol": 1e-3} if args.quantise is None else {"atol": 0.02}
        clients = [Load(port, trainer.probe, want, slack) for _ in range(args.clients)]
        for client in clients:
            client.start()
        for number in range(1, args.updates + 1):
            time.sleep(args.seconds / (args.updates + 1))
            loss = trainer.train(max(args.steps // 4, 1))
            trainer.save(folder, number)
            want[releases.current().number + 1] = trainer.want()
            started = time.perf_counter()
            new = releases.follow(folder / "checkpoints", trainer.files())
            took = time.perf_counter() - started
            print(f"loss {loss:.4f}; release {new.number} of a delta, {len(new['ads']):,} rows, {1e3 * took:.0f} ms")
        time.sleep(args.seconds / (args.updates + 1))
        for client in clients:
            client.done.set()
        for client in clients:
            client.join()
            if client.error is not None:
                raise client.error
    finally:
        server.terminate()
        server.wait()
    trainer.export(folder)
    seen = set().union(*(client.releases for client in clients))
    print(f"answers of releases {sorted(seen)}, each as the model of its release says; no request failed")

    command = [*me, "--program", str(folder), "--batches", str(args.batches)]
    program = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    keys, frozen = trainer.probe[0].size, releases.current()["ads"]
    report({
        f"HTTP, {args.clients} clients": ([s for client in clients for s in client.seconds], keys * args.clients),
        "exported program": (program, keys),
        f"FrozenTable, {frozen.dtype}": (timed(frozen, trainer.probe[0], args.batches), keys),
    })  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a log in the Criteo format; by default a synthetic one")
    parser.add_argument("--rows", type=positive, default=60_000, help="of the synthetic log")
    parser.add_argument("--batch", type=positive, default=512)
    parser.add_argument("--steps", type=positive, default=160, help="before the first release; a quarter each later")
    parser.add_argument("--updates", type=positive, default=3, help="releases while the server answers")
    parser.add_argument("--seconds", type=float, default=3.0, help="of load, beside training")
    parser.add_argument("--clients", type=positive, default=2)
    parser.add_argument("--quantise", choices=("float16", "bfloat16", "int8"), help="store rows with fewer bits")
    parser.add_argument("--batches", type=positive, default=300, help="to time the other two by")
    parser.add_argument("--smoke", action="store_true", help="a short run, to see that it works")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder; default: one that goes at the end")
    parser.add_argument(
        "--serve", type=Path, metavar="FOLDER", help="only answer from this folder of releases, once one is in it"
    )
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    return parsed(parser, rows=4000, batch=64, steps=12, updates=2, seconds=0.6, batches=10)


def main() -> None:
    args = arguments()
    sys.stdout.reconfigure(line_buffering=True)  # what a run that is killed has said is not lost
    if args.serve:
        serve(args.serve)
    elif args.program:
        run_program(args.program, args.batches)
    else:
        from criteo import FormatError

        if args.out and args.out.exists() and any(args.out.iterdir()):
            sys.exit(f"--out {args.out}: want a new folder or an empty one, there are files in it")
        try:
            with contextlib.nullcontext(args.out) if args.out else tempfile.TemporaryDirectory() as folder:
                run(args, Path(folder))
        except (FormatError, OSError) as error:  # files that are not there, or something else
            sys.exit(str(error))


if __name__ == "__main__":
    main()
