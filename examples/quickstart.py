"""Deploy a model on the cluster and ask it something.

p2pshard up                                 # on each machine
p2pshard pull smollm2-135m-instruct         # on one of them
python examples/quickstart.py [MODEL] [PROMPT] [--node HOST:PORT]
"""

from __future__ import annotations

import argparse

from p2pshard import Client


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("prompt", nargs="?", default="What is the capital of France?")
    parser.add_argument(
        "--node", action="append", help="HOST:PORT; default: this machine's, else found by zeroconf"
    )
    options = parser.parse_args()

    with Client(options.node) as client:
        deployment = client.deploy(options.model)  # returns at once when it is deployed already
        answer = client.chat(deployment.model, options.prompt, max_tokens=64).result()

    print(answer.text)
    print(f"{answer.completion_tokens} tokens, {answer.tokens_per_second:.1f} tokens/s")
    assert answer.plan is not None
    for stage in answer.plan.stages:
        print(f"layers {stage.layers[0]}-{stage.layers[1]} on node {stage.node}")


if __name__ == "__main__":
    main()
