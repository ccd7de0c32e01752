"""`python -m sparseety.probe URL`: a health check for images without curl. Exit code 0: the answer is 200."""

import sys
import urllib.request
from collections.abc import Sequence

SECONDS = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1 or not arguments[0].startswith(("http://", "https://")):
        print("usage: python -m sparseety.probe URL", file=sys.stderr)
        return 2
    # Directly: a proxy that the environment names is for the way out, not for this machine's own ports.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(arguments[0], timeout=SECONDS) as reply:
            said = int(reply.status)
    except (OSError, ValueError) as error:  # HTTP errors are OSErrors
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0 if said == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
