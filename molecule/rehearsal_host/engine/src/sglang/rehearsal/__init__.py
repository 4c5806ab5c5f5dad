# Copyright: the blackwell.dsv4 authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of the rehearsal engine.

flags     command line, from the table dumped off the real parser
resolve   what SGLang makes of the flags for DeepSeek-V4 on sm_120
devices   GPUs of the description file: what may be used, how much memory, who uses it
ranks     the processes that stand for the schedulers
encoding  prompt to token ids and token ids to message, by deepseek-recipe
script    what the model says: a function of the prompt
transfer  bootstrap and KV transfer between the two halves
engine    requests in flight, token by token
chat      OpenAI requests and answers
server    HTTP routes
faults    misbehaviour on demand
launch    start, ready, stop
"""
