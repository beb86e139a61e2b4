# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The figures of a plan."""


def facts_of(plan, bandwidth):
    """The figures of a plan in plain numbers: links as `[from, to, bytes]`, heaviest first. `seconds` is what the
    busiest process needs at `bandwidth`, in bytes per second and direction, None without one."""
    links = plan.link_bytes()
    table = zip(links.source.tolist(), links.target.tolist(), links.numbytes.tolist())
    remote = [[source, target, numbytes] for source, target, numbytes in table if source != target]
    sent, received = plan.sent_bytes(), plan.received_bytes()
    most = max([*sent.values(), *received.values()], default=0)
    return {
        "parameters": len(plan),
        "segments": plan.segments,
        "sent_bytes": sum(sent.values()),
        "local_bytes": plan.local_bytes(),
        "busiest_sender": _busiest(sent),
        "busiest_receiver": _busiest(received),
        "seconds": most / bandwidth if bandwidth else None,
        "links": sorted(remote, key=lambda link: (-link[2], link))
    }


def _busiest(numbytes):
    return max(numbytes.items(), key=lambda item: (item[1], -item[0])) if numbytes else None
