"""A stream over a raw ZeroMQ socket, without Penstock's client.

Run `launch all`, then `python examples/zmq_client.py [ENDPOINT]`. A DEALER socket gets any number
of deltas and then the reply. Other languages need ZeroMQ and JSON only.
"""

import sys

import zmq


def main() -> None:
    """Print the text of an answer while it is generated, and then the token counts."""
    endpoint = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555"
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_json({"prompt": "count from 3 to 9", "max_tokens": 64, "stream": True})
        while (message := socket.recv_json())["type"] == "delta":
            print(message.get("text", ""), end="", flush=True)
    if message["type"] == "error":
        sys.exit(f"{message['code']}: {message['message']}")
    print("\n", message["usage"], sep="")


if __name__ == "__main__":
    main()
