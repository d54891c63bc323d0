"""The messages of a channel as Triton requests, and its responses as news."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tritonclient.grpc import service_pb2

from shoal.backend.channel_messages import ChannelOrders, ReadNews, Submission
from shoal.client import tensors
from shoal.client.errors import ShoalError


class ChannelWire:
    """Between one model's channels and gRPC. No state but buffers."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ReadNews)

    def submission(
        self,
        ref: int,
        *,
        text_input: str | None,
        messages: str | None,
        input_ids: Sequence[int] | None,
        sampling: Mapping[str, Any] | None,
        stream: bool,
        return_logprobs: bool,
        echo: bool,
        parameters: Mapping[str, str | int | bool] | None,
        request_id: str,
    ) -> bytes:
        """One request, encoded. Raises ShoalError for what cannot be sent."""
        submission = Submission(
            ref,
            _utf8("text_input", text_input),
            _utf8("messages", messages),
            None if input_ids is None else tensors.checked_token_ids(input_ids).tolist(),
            tensors.encode_sampling({**(sampling or {})}).encode(),
            stream,
            return_logprobs,
            False,
            echo,
            dict(parameters or {}),
            request_id,
        )
        try:
            return self._encoder.encode(submission)
        except (UnicodeEncodeError, TypeError, OverflowError) as error:
            raise ShoalError("The request cannot be sent.", 400, detail=str(error)) from None

    def request(self, orders: ChannelOrders, message_id: str, version: str) -> Any:
        data = self._encoder.encode(orders)
        request = service_pb2.ModelInferRequest(
            model_name=self._model,
            model_version=version,
            id=message_id,
            raw_input_contents=[data],
        )
        request.inputs.add(name="channel", datatype="UINT8", shape=[len(data)])
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        return request

    def news(self, response: Any) -> ReadNews:
        """None at all, of a response without outputs."""
        return self._decoder.decode(
            response.raw_output_contents[0] if response.outputs else b"\x80"
        )


def _utf8(name: str, text: str | None) -> bytes | None:
    try:
        return None if text is None else text.encode()
    except UnicodeEncodeError:
        raise ShoalError(f"{name} holds text that is not valid Unicode.", 400) from None
