"""Own the JSON body of the TGI routes: every member, its type and its bounds, as pydantic models.

Runs in PROCESS 1. The members are those of text-generation-inference 3 (docs/openapi.json, `GenerateParameters`); each
is honoured or refused by its name. Pure: knows no Flask, no tokenizer and no model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from inference_api.server.bodies import MAX_COUNT, MAX_STOPS, MAX_TOP_LOGPROBS, FormText, Schema, StopText, StrictModel
from inference_api.server.generation_request import MAX_CHOICES
from inference_api.server.validation import MAX_SEED


class GrammarParameter(StrictModel):
    """The form of the answer. What `value` may be depends on `type`, and is checked with it."""

    type: Literal["json", "regex", "json_schema"]
    value: Schema | FormText = Field(description="A JSON schema, a regular expression, or an object of a `schema`.")


class GenerateParameters(StrictModel):
    """How to continue a text. A member that is null is absent; without any of them the answer is greedy."""

    adapter_id: None = Field(None, description="Refused: there are no adapters.")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Makes so many, returns the likeliest.")
    decoder_input_details: bool | None = Field(
        None, description="Reports the prompt's tokens with their logprobs; not in a stream."
    )
    details: bool | None = Field(None, description="Reports the end, and the tokens with their logprobs.")
    do_sample: bool | None = Field(None, description="Draws, as temperature, top_k, top_p and typical_p do, too.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Taken as often as the answer holds one.")
    grammar: GrammarParameter | None = Field(None, description="The form of the answer.")
    max_new_tokens: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Ends an answer after so many tokens; default 100."
    )
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Of tokens of prompt and answer.")
    return_full_text: bool | None = Field(None, description="Puts the prompt before the answer.")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="Makes the draws repeatable.")
    stop: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="Texts before which an answer ends."
    )
    temperature: float | None = Field(None, gt=0, le=100, description="Flattens (above 1) or sharpens.")
    top_k: int | None = Field(None, ge=1, le=MAX_COUNT, description="Keeps so many of the likeliest tokens.")
    top_n_tokens: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Reports so many likeliest tokens at each position."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Keeps the likeliest tokens that add up to this.")
    truncate: int | None = Field(None, ge=1, le=MAX_COUNT, description="Keeps so many of the prompt's last tokens.")
    typical_p: float | None = Field(None, gt=0, le=1, description="Keeps the least surprising tokens.")
    watermark: bool | None = Field(None, description="Refused when true: answers carry no mark.")

    @field_validator("adapter_id", mode="before")
    @classmethod
    def _refuse_unserved(cls, value: object) -> object:
        if value is not None:
            raise PydanticCustomError("unserved", "is not served here, leave it out")
        return value

    @field_validator("watermark")
    @classmethod
    def _refuse_watermark(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError("unserved", "answers carry no watermark here, leave it out")
        return value

    @property
    def draws(self) -> bool:
        """Whether the answer is sampled: asked for, or implied by a parameter that says how."""
        shapes = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return bool(self.do_sample) or any(shape is not None for shape in shapes)


class GenerateBody(StrictModel):
    """The body of the three routes; `stream` chooses on `POST /`, and may say on the others what they do anyway."""

    inputs: str = Field(min_length=1, description="The prompt.")
    parameters: GenerateParameters | None = None
    stream: bool | None = Field(None, description="Sends server-sent events.")

    @property
    def given(self) -> GenerateParameters:
        """The parameters, none of them set where the body has none."""
        return self.parameters if self.parameters is not None else GenerateParameters.model_validate({})
