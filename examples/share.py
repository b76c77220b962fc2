"""Merge a run into its base, and show what a push would upload: python examples/share.py runs/animals me/animals

Nothing is uploaded. To upload it: hf auth login, then scu-trainer push runs/animals-merged --repo_id me/animals
"""

import sys

from scu_trainer.cli.main import main

if len(sys.argv) < 3:
    sys.exit(__doc__)
run, repository = sys.argv[1:3]
sys.exit(
    main(["merge", run, "--output", f"{run}-merged"])
    or main(["push", f"{run}-merged", "--repo_id", repository, "--dry_run"])
)
