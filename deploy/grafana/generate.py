"""Write the dashboards of the tables beside this as JSON: python -m deploy.grafana.generate"""

import json
from pathlib import Path

from deploy.grafana.capture import CAPTURE_HEALTH
from deploy.grafana.overview import OVERVIEW
from deploy.grafana.panels import Dashboard, dashboard_json
from deploy.grafana.sparsity import SPARSITY
from deploy.grafana.tokens import TOKENS
from deploy.grafana.verification import VERIFICATION

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = (OVERVIEW, TOKENS, SPARSITY, VERIFICATION, CAPTURE_HEALTH)


def files(dashboards: tuple[Dashboard, ...] = DASHBOARDS) -> dict[str, str]:
    """Text by file name."""
    return {f"{each.uid}.json": json.dumps(dashboard_json(each), indent=1) + "\n" for each in dashboards}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
