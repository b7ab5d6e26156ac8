"""The life of a process that runs one check."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import msgspec

from connectors.conformance.channel import Channel, ChannelError
from connectors.conformance.checks import CHECKS
from connectors.conformance.ends import FailedError, RefusedError
from connectors.conformance.factory import ConnectorFactory
from connectors.conformance.harness import NotTriedError
from connectors.conformance.kit import Kit, Settings
from connectors.conformance.report import Outcome


def serve_check(channel: Channel, path: str, check: str, factory: Any, settings: Any) -> None:
    """Run it and send `{"outcome": …, "reason": …}`."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {check}: %(message)s")
    kit = Kit(check, msgspec.convert(factory, ConnectorFactory), msgspec.convert(settings, Settings), channel, path)
    outcome, reason = Outcome.PASSED, ""
    try:
        CHECKS[check].run(kit)
        kit.close_all()
    except FailedError as error:
        outcome, reason = Outcome.FAILED, str(error)
        traceback.print_exc()
    except RefusedError as error:
        outcome, reason = Outcome.REFUSED, str(error)
    except NotTriedError as error:
        outcome, reason = Outcome.NOT_TRIED, str(error)
    except ChannelError as error:
        outcome, reason = Outcome.NOT_TRIED, f"the kit's own processes do not answer: {error}"
    except Exception as error:  # the check's own fault: say so rather than pass
        traceback.print_exc()
        outcome, reason = Outcome.FAILED, f"the check itself ended by {type(error).__name__}: {error}"
    channel.send(outcome=outcome, reason=" ".join(reason.split())[:300])
