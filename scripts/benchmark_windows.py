"""Measure the windows on a long run: the report, the browser's and the terminal's.

    esper train iris --rounds 500 --envs 64 --steps 12 --set ppo.imitation_rounds=0 --run runs/long
    python scripts/benchmark_windows.py runs/long --grow 64 --out docs/benchmarks/windows.md

RUN is a run that has ended. Report: time and peak memory of `esper report`. Browser: how soon chromium paints the page of the run
on a server that has just begun, and how soon the report is there; then RUN is played again into another folder, row by row at the
pace at which it was written but faster, while clients follow the page, and the resident memory of the server is read all the
time. Terminal: CPU seconds of `esper watch` in an 80 by 24 terminal, over the time that passes, on the run that has ended, on the
run that is played again at its own pace, and on a growth of --grow environments that goes on.
"""

import argparse
import json
import os
import pty
import resource
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

import esper
from esper.karn.serve.library import key_of
from esper.nissa.events import decode
from esper.store.files import CONFIG, ENVIRONMENT, EVENTS
from esper.store.lock import LOCK, describe_process

CLIENTS = 3
SAMPLES = 120  # of the memory of the server
LOOKS = 30  # most looks whether a window is still reading
COMMAND = [sys.executable, "-m", "esper"]
HEAD = """# Benchmark: the windows on a long run

What `esper report`, `esper serve` and `esper watch` take on a long training, measured by `scripts/benchmark_windows.py`, which
explains the method and names the commands.

"""


class Line(NamedTuple):
    """Holds a figure and the bound that it must keep."""

    what: str
    value: str
    bound: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of a run that has ended")
    parser.add_argument("--seconds", type=float, default=60.0, help="time over which each CPU share is measured")
    parser.add_argument(
        "--replay", type=float, default=180.0, help="seconds in which the last hour of the run is played"
    )
    parser.add_argument(
        "--grow", type=int, default=64, help="environments of the growth that is watched; 0 leaves it out"
    )
    parser.add_argument(
        "--warm", type=float, default=10.0, help="seconds between two looks whether a window is still reading"
    )
    parser.add_argument("--machine", default="", help="the machine in words, for the page")
    parser.add_argument("--out", type=Path, help="the page to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [*report(arguments.run, folder), *first_paint(arguments.run)]
        lines += followed(arguments.run, folder / "replayed", arguments.replay, arguments.warm)
        times = arguments.seconds, arguments.warm
        lines.append(ended_terminal(arguments.run, *times))
        lines.append(training_terminal(arguments.run, folder / "paced", *times))
        if arguments.grow:
            lines.append(growing_terminal(folder / "growing", arguments.grow, *times))
    text = HEAD + describe_run(arguments.run, arguments.machine) + table(lines)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


def describe_run(run: Path, machine: str) -> str:
    """Describe the run and the machine in words."""
    events, opened = run / EVENTS, esper.open_run(run)
    with open(events, "rb") as file:
        rows = sum(1 for _ in file)
    config = opened.config
    what = f"{config['ppo']['rounds']} rounds by {config['envs']} environments of {config['steps']} steps"
    where = f"{machine + '; ' if machine else ''}load average {os.getloadavg()[2]:.1f} over the last 15 minutes"
    return f"The run: a training of {what}, {rows:,} rows, {events.stat().st_size / 1e6:.0f} MB of events. Machine: {where}.\n\n"


def table(lines: Sequence[Line]) -> str:
    """Return a table in Markdown."""
    rows = "".join(f"| {line.what} | {line.value} | {line.bound} |\n" for line in lines)
    return f"| what | measured | bound |\n|---|---|---|\n{rows}"


def report(run: Path, folder: Path) -> list[Line]:
    """Measure time, CPU time and peak memory of `esper report`."""
    started = time.monotonic()
    with subprocess.Popen(
        [*COMMAND, "report", str(run), "--out", str(folder / "report.html")], stdout=subprocess.DEVNULL
    ) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    seconds = time.monotonic() - started
    size = (folder / "report.html").stat().st_size
    return [
        Line("report: time (of it, of the CPU)", f"{seconds:.1f} s ({cpu_of(used):.1f} s)", "20 s"),
        Line("report: peak resident memory", f"{used.ru_maxrss / 1024:.0f} MB", "1,000 MB"),
        Line("report: size of the page", f"{size / 1e6:.2f} MB", ""),
    ]


def cpu_of(used: resource.struct_rusage) -> float:
    """Return the CPU seconds of a process and of the kernel for it."""
    return used.ru_utime + used.ru_stime


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, str]]:
    """Start `esper serve`, and yield its process number and address."""
    command = [*COMMAND, "serve", "--port", "0", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, process.stdout.readline().split()[2].rstrip("/")
        finally:
            process.terminate()


def first_paint(run: Path) -> list[Line]:
    """Measure when chromium first paints the page of a run and shows its report, on a server that has read nothing yet."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("error: no chromium was found; install it, as with apt-get install chromium")
    with sync_playwright() as player, served(run) as (pid, address):
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto("about:blank")
        started = time.monotonic()
        page.goto(f"{address}/runs/{key_of(run.resolve())}", wait_until="commit")
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length > 0")
        painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
        page.locator("#training svg").first.wait_for(timeout=300_000)
        complete, memory = time.monotonic() - started, resident(pid)
        browser.close()
    return [
        Line("serve: first paint of the run's page", f"{painted:.2f} s", "2 s"),
        Line("serve: until the report stands on it", f"{complete:.1f} s", ""),
        Line("serve: memory after that", f"{memory:.0f} MB", ""),
    ]


def followed(run: Path, folder: Path, seconds: float, warm: float) -> list[Line]:
    """Measure the server's memory while the last hour of a run is played in `seconds` and clients follow its page."""
    rows = Replay(run, folder)
    with served(folder) as (pid, address):
        clients = [threading.Thread(target=follow, args=(address, key_of(folder)), daemon=True) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        seen: list[tuple[float, float]] = []
        started = time.monotonic()
        player = threading.Thread(target=rows.play, args=(3600.0, seconds), daemon=True)
        time.sleep(warm)
        player.start()
        while player.is_alive():
            seen.append((time.monotonic() - started, resident(pid)))
            time.sleep(seconds / SAMPLES)
    quarter = max(len(seen) // 4, 1)
    parts = [
        statistics.median(memory for _, memory in seen[at : at + quarter]) for at in range(0, 4 * quarter, quarter)
    ]
    peak = max(memory for _, memory in seen)
    shown = ", ".join(f"{part:.0f}" for part in parts)
    return [
        Line(
            f"serve: memory in each quarter of an hour that is played in {seconds:.0f} s for {CLIENTS} clients",
            f"{shown} MB, at most {peak:.0f} MB",
            "flat",
        )
    ]


class Replay:
    """Plays a copy of a run that goes on: its rows are written again in their order and at their pace, or faster."""

    def __init__(self, run: Path, folder: Path, last: float = 3600.0) -> None:
        """Writes all but the rows of the `last` seconds, of which there are at most those after the first tenth of the run."""
        folder.mkdir()
        for name in (CONFIG, ENVIRONMENT):
            shutil.copy(run / name, folder)
        # this process passes for the one that writes the run
        (folder / LOCK).write_text(json.dumps(describe_process()))
        self.events = folder / EVENTS
        lines = (run / EVENTS).read_bytes().splitlines(keepends=True)[:-1]  # the last row says that the run has ended
        times = [decode(line).time for line in lines]
        begin = max(times[-1] - last, times[0] + 0.1 * (times[-1] - times[0]))
        count = next(index for index, moment in enumerate(times) if moment >= begin)
        self.events.write_bytes(b"".join(lines[:count]))
        self.lines, self.times = lines[count:], [moment - begin for moment in times[count:]]

    def play(self, span: float, seconds: float) -> None:
        """Write the rows of the last `span` seconds of the run within `seconds`."""
        pace, started = min(span, self.times[-1]) / seconds, time.monotonic()
        at = 0
        with open(self.events, "ab") as file:
            while at < len(self.lines) and (now := (time.monotonic() - started) * pace) < span:
                end = at
                while end < len(self.lines) and self.times[end] <= now:
                    end += 1
                file.write(b"".join(self.lines[at:end]))
                file.flush()
                at = end
                time.sleep(0.1)


def follow(address: str, key: str) -> None:
    """Ask for the page of a run twice a second, until the server ends."""
    version = ""
    try:
        while True:
            request = urllib.request.Request(f"{address}/runs/{key}/content", headers={"X-Version": version})
            with urllib.request.urlopen(request, timeout=60) as answer:
                if answer.status == 200:
                    answer.read()
                    version = answer.headers["X-Version"]
            time.sleep(0.5)
    except OSError:
        return


def resident(pid: int) -> float:
    """Return the resident memory of a process [MB]."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def ended_terminal(run: Path, seconds: float, warm: float) -> Line:
    """Measure the CPU share of the window on a run that has ended."""
    return Line("watch: CPU on the run that has ended", share(run, seconds, warm)[0], "5 %")


def training_terminal(run: Path, folder: Path, seconds: float, warm: float) -> Line:
    """Measure the CPU share of the window on the training at its own pace."""
    rows = Replay(run, folder, 4 * (seconds + warm))
    threading.Thread(target=rows.play, args=(float("inf"), rows.times[-1]), daemon=True).start()
    return Line("watch: CPU on the training at its own pace", share(folder, seconds, warm)[0], "5 %")


def growing_terminal(folder: Path, envs: int, seconds: float, warm: float) -> Line:
    """Measure the CPU share of the window on a growth that goes on."""
    settings = ["--envs", str(envs), "--steps", "100000", "--set", "models=none", "--set", "baselines=[]"]
    command = [
        "nice",
        "-n",
        "19",
        *COMMAND,
        "grow",
        "digits",
        "--controller",
        "random-valid",
        *settings,
        "--run",
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not (folder / EVENTS).exists() or b'"step"' not in (folder / EVENTS).read_bytes():
                time.sleep(0.5)
            before = step_of(folder)
            shown, passed = share(folder, seconds, warm)
            pace = (step_of(folder) - before) / passed
        finally:
            process.kill()
    return Line(f"watch: CPU on a growth of {envs} environments on digits, {pace:.1f} steps a second", shown, "5 %")


def step_of(folder: Path) -> int:
    """Count the steps that a run has written."""
    with open(folder / EVENTS, "rb") as file:
        return sum(b'"kind":"step"' in line for line in file)


def share(run: Path, seconds: float, warm: float) -> tuple[str, float]:
    """Measure the CPU share of `esper watch` once it has read what there was, in words; also return the seconds of all that."""
    began = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*COMMAND, "watch", str(run)])
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    threading.Thread(target=drain, args=(terminal,), daemon=True).start()
    try:
        before = -warm
        for _ in range(LOOKS):
            if seconds_of(pid) - before <= 0.05 * warm:  # it has read what there was
                break
            before = seconds_of(pid)
            time.sleep(warm)
        start, used = time.monotonic(), seconds_of(pid)
        time.sleep(seconds)
        taken = (seconds_of(pid) - used) / (time.monotonic() - start)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return f"{100 * taken:.1f} % (before that {used:.1f} s, to begin and to read)", time.monotonic() - began


def drain(terminal: int) -> None:
    """Read what a terminal is sent, until its process ends."""
    try:
        while os.read(terminal, 2**16):
            pass
    except OSError:  # how the end of a pseudo-terminal is told on Linux
        return


def seconds_of(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
