# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rehearsal engine. It takes the name of SGLang so that units need not know which of both they start."""

__version__ = "0.5.23+rehearsal"
