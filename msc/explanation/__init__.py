"""`program.explain()`: where everything lies, what is sent, and why.

`facts` are the values that an explanation consists of, `overview` reads them off a compilation,
`why` asks the search for the alternatives, `text` and `page` show them.
"""

from msc.explanation.explain import Explainer, explain
from msc.explanation.facts import Explanation

__all__ = ["Explainer", "Explanation", "explain"]
