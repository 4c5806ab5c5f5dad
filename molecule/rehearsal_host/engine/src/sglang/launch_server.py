# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""`python -m sglang.launch_server ARGUMENTS`, as SGLang 0.5.23 is started."""
from __future__ import annotations

import sys

from sglang.rehearsal import launch

if __name__ == "__main__":
    sys.exit(launch.main(sys.argv[1:]))
