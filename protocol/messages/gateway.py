"""Messages to the gateway from all other processes."""

from penstock.protocol.messages.detokenizer import TextDeltas
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.protocol.messages.tokenizer import RequestFailed

ToGateway = TextDeltas | RequestFailed | SchedulerStatus | SupervisorReport
