"""What a user would write instead: the stock Trainer with peft on a file of documents. For startup.py.

python benchmarks/headline/startup_stock.py --model FOLDER --documents FILE.jsonl [the flags of TrainingArguments]
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

BLOCK = 256


@dataclass
class Files:
    model: str
    documents: str


def main() -> None:
    files, args = HfArgumentParser([Files, TrainingArguments]).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    rows = load_dataset("json", data_files=files.documents, split="train")
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=BLOCK), remove_columns=["text"])
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(files.model),
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model=model, args=args, train_dataset=rows, data_collator=collator, processing_class=tokenizer).train()


if __name__ == "__main__":
    main()
