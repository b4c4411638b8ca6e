"""Replaces a run's process: `python -m scripted_child DESCRIPTOR` does what the request's `config` says."""

import os
import signal
import socket
import sys
import time

import msgspec

from streamppo.api.messages import RunReply, RunRequest, encode


def main(channel: socket.socket) -> int:
    request = msgspec.json.decode(channel.makefile("rb").readline(), type=RunRequest)
    channel.sendall(encode(RunReply(folder="/runs/scripted")))
    match request.config.split():
        case ["prints", text]:
            data = text.encode()
            for byte in data:
                os.write(1, bytes([byte]))
                time.sleep(0.01)
            os.write(2, b"!\n")
            return 0
        case ["raises", kind, code]:
            channel.sendall(encode(RunReply(error=kind, text="its words, in two\nlines")))
            return int(code)
        case ["raises_at_length", kind, characters]:
            channel.sendall(encode(RunReply(error=kind, text="x" * int(characters))))
            return 1
        case ["breaks_off"]:
            channel.sendall(encode(RunReply(error="RunError", text="not sent whole"))[:-9])
            os.kill(os.getpid(), signal.SIGKILL)
        case ["prints_at_its_end", lines]:
            print("begun", flush=True)
            while channel.recv(2**16):
                pass
            for number in range(int(lines)):
                print(f"line {number} while the last checkpoint is written", flush=True)
            return 0
        case ["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["interrupts"]:
            heard: list[int] = []
            signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
            # Like a terminal: to the script's whole process group.
            os.killpg(os.getpgid(os.getppid()), signal.SIGINT)
            while not heard:
                time.sleep(0.01)
            # One Ctrl-C is one signal.
            time.sleep(0.2)
            print(f"heard {len(heard)}", flush=True)
            return 130
    return 3


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
