"""Let the launchers of a run meet, on a network where strangers may listen and write.

A reader of the launcher may skip this package. torch's own rendezvous listens on all interfaces and
unpickles what it reads from its store. Here a run on one node opens no port (``handlers``), the
store of several nodes listens on one address (``endpoint``), and its state is JSON that a shared
token signs (``signed_state``). Objects that ranks exchange are JSON too
(``train/object_collectives``). docs/security.md lists what this protects and what it does not.
"""

from .handlers import LocalRendezvous, describe_rendezvous_error, make_rendezvous
from .signed_state import read_token

__all__ = [
    "LocalRendezvous",
    "describe_rendezvous_error",
    "make_rendezvous",
    "read_token",
]
