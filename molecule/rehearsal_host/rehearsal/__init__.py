# SPDX-License-Identifier: GPL-3.0-or-later
"""The rehearsal host: a Debian root with real systemd, apt and SSH on which the playbooks are tried."""
