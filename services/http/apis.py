"""The list of all APIs: the only file of the core that imports extras.

To add an API, add the operations of its module here.
"""

from penstock.services.http import messages, pooling, routes, status
from penstock.services.http.generation import chat, completions
from penstock.services.http.responses import routes as responses

OPERATIONS = [
    *chat.OPERATIONS,
    *completions.OPERATIONS,
    *messages.OPERATIONS,  # extra
    *responses.OPERATIONS,  # extra
    *pooling.OPERATIONS,  # extra
    *routes.OPERATIONS,
    *status.OPERATIONS,
]
