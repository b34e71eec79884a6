"""What tests of pipelines need: ranks as threads of one process, a suite that every transport must pass, and faults."""

from __future__ import annotations

from pipeline_engine.testing.conformance import CHECKS as CHECKS
from pipeline_engine.testing.conformance import RunRanks as RunRanks
from pipeline_engine.testing.conformance import check_transport as check_transport
from pipeline_engine.testing.faults import Fault as Fault
from pipeline_engine.testing.faults import FaultyTransport as FaultyTransport
from pipeline_engine.testing.threads import run_ranks_in_threads as run_ranks_in_threads
