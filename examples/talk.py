"""Ask a run, an adapter or a model: python examples/talk.py runs/animals "What does the duck say?"

In a terminal, `scu-trainer chat runs/animals --against base` holds a conversation.
"""

import sys

from scu_trainer.settings import ModelSettings
from scu_trainer.talk.answers import AnswerSettings, stream
from scu_trainer.talk.model import load_talker

if len(sys.argv) < 2:
    sys.exit(__doc__)
run, question = sys.argv[1], " ".join(sys.argv[2:]) or "What does the duck say?"
talker = load_talker(run, ModelSettings(model_name_or_path=run))
prompt = talker.encoded([{"role": "user", "content": question}])
for text in stream(talker, prompt, AnswerSettings(max_new_tokens=40)):
    print(text, end="", flush=True)
print()
