"""What is wrong with this machine, as far as this program is concerned: `examine` an `Examination`.

This process loads no model library: what could crash, hang or take memory is asked of child processes.
"""

from .check import Check, Status
from .checks import CHECKS, examine
from .examination import Examination

__all__ = ["CHECKS", "Check", "Examination", "Status", "examine"]
