"""Deploy a model again over one more machine.

Start `p2pshard up` on the new machine while this waits; the model is then split over all nodes.

    python examples/add_a_device.py [MODEL] [--nodes 2] [--node HOST:PORT]
"""

from __future__ import annotations

import argparse
import sys
import time

from p2pshard import Client, Plan


def show(plan: Plan | None, names: dict[str, str]) -> None:
    for stage in plan.stages if plan else ():
        print(f"  layers {stage.layers[0]}-{stage.layers[1]} on {names.get(stage.node, stage.node)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--nodes", type=int, default=2, help="how many nodes to wait for")
    parser.add_argument("--timeout", type=float, default=300, help="seconds to wait")
    parser.add_argument(
        "--node", action="append", help="HOST:PORT; default: this machine's, else found by zeroconf"
    )
    options = parser.parse_args()

    with Client(options.node) as client:
        deadline = time.monotonic() + options.timeout
        status = client.status()
        print(f"{len(status.nodes)} node(s): {', '.join(n.name for n in status.nodes)}")
        while len(status.nodes) < options.nodes:
            if time.monotonic() > deadline:
                for peer in status.not_joined:  # each says why, and what to do
                    print(f"{peer.address} did not join: {peer.reason}")
                sys.exit(f"only {len(status.nodes)} of {options.nodes} nodes after {options.timeout:g} s")
            time.sleep(0.5)
            status = client.status()
        names = {n.id: n.name for n in status.nodes}

        before = status.deployment(options.model)
        if before:
            print("before:")
            show(before.plan, names)
            client.undeploy(options.model)
        deployment = client.deploy(options.model, nodes=options.nodes)
        print(f"now over {options.nodes} node(s):")
        show(deployment.plan, names)


if __name__ == "__main__":
    main()
