# Copyright: (c) 2026, blackwell.dsv4 contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The rehearsal engine. It takes the name of SGLang so that units need not know which of both they start."""

__version__ = "0.5.23+rehearsal"
