from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransportType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPEC: _ClassVar[TransportType]
    TRANSPORT_RDMA: _ClassVar[TransportType]
    TRANSPORT_MNNVL: _ClassVar[TransportType]
    TRANSPORT_SHM: _ClassVar[TransportType]
    TRANSPORT_NVLINK: _ClassVar[TransportType]
    TRANSPORT_GDS: _ClassVar[TransportType]
    TRANSPORT_IO_URING: _ClassVar[TransportType]
    TRANSPORT_TCP: _ClassVar[TransportType]
    TRANSPORT_ASCEND: _ClassVar[TransportType]
    TRANSPORT_SUNRISE_LINK: _ClassVar[TransportType]
    TRANSPORT_TPU: _ClassVar[TransportType]
    TRANSPORT_UB: _ClassVar[TransportType]
    TRANSPORT_MPCOMM: _ClassVar[TransportType]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATUS_INITIAL: _ClassVar[Status]
    STATUS_PENDING: _ClassVar[Status]
    STATUS_INVALID: _ClassVar[Status]
    STATUS_CANCELED: _ClassVar[Status]
    STATUS_COMPLETED: _ClassVar[Status]
    STATUS_TIMEOUT: _ClassVar[Status]
    STATUS_FAILED: _ClassVar[Status]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_HIGH: _ClassVar[Priority]
    PRIORITY_MEDIUM: _ClassVar[Priority]
    PRIORITY_LOW: _ClassVar[Priority]

class Intent(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INTENT_UNSPEC: _ClassVar[Intent]
    INTENT_FOREGROUND_GET: _ClassVar[Intent]
    INTENT_BACKGROUND_PREFETCH: _ClassVar[Intent]
    INTENT_MIGRATION: _ClassVar[Intent]
    INTENT_CHECKPOINT: _ClassVar[Intent]
    INTENT_WEIGHT_LOADING: _ClassVar[Intent]
    INTENT_STAGING_INTERNAL: _ClassVar[Intent]

class Permission(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PERMISSION_LOCAL_READ_WRITE: _ClassVar[Permission]
    PERMISSION_GLOBAL_READ_ONLY: _ClassVar[Permission]
    PERMISSION_GLOBAL_READ_WRITE: _ClassVar[Permission]

class Opcode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPCODE_READ: _ClassVar[Opcode]
    OPCODE_WRITE: _ClassVar[Opcode]

class BufferState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUFFER_STATE_LIVE: _ClassVar[BufferState]
    BUFFER_STATE_REVOKING: _ClassVar[BufferState]
TRANSPORT_UNSPEC: TransportType
TRANSPORT_RDMA: TransportType
TRANSPORT_MNNVL: TransportType
TRANSPORT_SHM: TransportType
TRANSPORT_NVLINK: TransportType
TRANSPORT_GDS: TransportType
TRANSPORT_IO_URING: TransportType
TRANSPORT_TCP: TransportType
TRANSPORT_ASCEND: TransportType
TRANSPORT_SUNRISE_LINK: TransportType
TRANSPORT_TPU: TransportType
TRANSPORT_UB: TransportType
TRANSPORT_MPCOMM: TransportType
STATUS_INITIAL: Status
STATUS_PENDING: Status
STATUS_INVALID: Status
STATUS_CANCELED: Status
STATUS_COMPLETED: Status
STATUS_TIMEOUT: Status
STATUS_FAILED: Status
PRIORITY_HIGH: Priority
PRIORITY_MEDIUM: Priority
PRIORITY_LOW: Priority
INTENT_UNSPEC: Intent
INTENT_FOREGROUND_GET: Intent
INTENT_BACKGROUND_PREFETCH: Intent
INTENT_MIGRATION: Intent
INTENT_CHECKPOINT: Intent
INTENT_WEIGHT_LOADING: Intent
INTENT_STAGING_INTERNAL: Intent
PERMISSION_LOCAL_READ_WRITE: Permission
PERMISSION_GLOBAL_READ_ONLY: Permission
PERMISSION_GLOBAL_READ_WRITE: Permission
OPCODE_READ: Opcode
OPCODE_WRITE: Opcode
BUFFER_STATE_LIVE: BufferState
BUFFER_STATE_REVOKING: BufferState

class Host(_message.Message):
    __slots__ = ("boot_id", "pid_namespace", "pid", "start_time")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    pid_namespace: int
    pid: int
    start_time: int
    def __init__(self, boot_id: _Optional[str] = ..., pid_namespace: _Optional[int] = ..., pid: _Optional[int] = ..., start_time: _Optional[int] = ...) -> None: ...

class Transport(_message.Message):
    __slots__ = ("name", "number")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: TransportType
    def __init__(self, name: _Optional[str] = ..., number: _Optional[_Union[TransportType, str]] = ...) -> None: ...

class Attribute(_message.Message):
    __slots__ = ("name", "number", "payload")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: TransportType
    payload: bytes
    def __init__(self, name: _Optional[str] = ..., number: _Optional[_Union[TransportType, str]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("name", "numa_node", "kind")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    numa_node: int
    kind: str
    def __init__(self, name: _Optional[str] = ..., numa_node: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ("id", "generation", "name", "address", "length", "location", "permission", "state", "attributes")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    PERMISSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    generation: int
    name: str
    address: int
    length: int
    location: str
    permission: Permission
    state: BufferState
    attributes: _containers.RepeatedCompositeFieldContainer[Attribute]
    def __init__(self, id: _Optional[int] = ..., generation: _Optional[int] = ..., name: _Optional[str] = ..., address: _Optional[int] = ..., length: _Optional[int] = ..., location: _Optional[str] = ..., permission: _Optional[_Union[Permission, str]] = ..., state: _Optional[_Union[BufferState, str]] = ..., attributes: _Optional[_Iterable[_Union[Attribute, _Mapping]]] = ...) -> None: ...

class SegmentHead(_message.Message):
    __slots__ = ("name", "incarnation", "host", "transports", "attributes", "devices")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: bytes
    host: Host
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    attributes: _containers.RepeatedCompositeFieldContainer[Attribute]
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., host: _Optional[_Union[Host, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., attributes: _Optional[_Iterable[_Union[Attribute, _Mapping]]] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ...) -> None: ...

class SegmentPart(_message.Message):
    __slots__ = ("head", "buffers", "removed")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    head: SegmentHead
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, head: _Optional[_Union[SegmentHead, _Mapping]] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class Fragment(_message.Message):
    __slots__ = ("version", "delta", "base", "data", "ends_part", "ends_update")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDS_PART_FIELD_NUMBER: _ClassVar[int]
    ENDS_UPDATE_FIELD_NUMBER: _ClassVar[int]
    version: int
    delta: bool
    base: int
    data: bytes
    ends_part: bool
    ends_update: bool
    def __init__(self, version: _Optional[int] = ..., delta: bool = ..., base: _Optional[int] = ..., data: _Optional[bytes] = ..., ends_part: bool = ..., ends_update: bool = ...) -> None: ...

class Forgotten(_message.Message):
    __slots__ = ("incarnation", "reason")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    reason: str
    def __init__(self, incarnation: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("protocol", "target", "name", "incarnation", "host", "transports", "nonce")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    target: str
    name: str
    incarnation: bytes
    host: Host
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    nonce: int
    def __init__(self, protocol: _Optional[int] = ..., target: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., host: _Optional[_Union[Host, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., nonce: _Optional[int] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("accepted", "refused", "other_name", "name", "incarnation", "host")
    class Accepted(_message.Message):
        __slots__ = ("session",)
        SESSION_FIELD_NUMBER: _ClassVar[int]
        session: int
        def __init__(self, session: _Optional[int] = ...) -> None: ...
    class Refused(_message.Message):
        __slots__ = ("reason",)
        REASON_FIELD_NUMBER: _ClassVar[int]
        reason: str
        def __init__(self, reason: _Optional[str] = ...) -> None: ...
    class OtherName(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OTHER_NAME_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    accepted: ConnectResponse.Accepted
    refused: ConnectResponse.Refused
    other_name: ConnectResponse.OtherName
    name: str
    incarnation: bytes
    host: Host
    def __init__(self, accepted: _Optional[_Union[ConnectResponse.Accepted, _Mapping]] = ..., refused: _Optional[_Union[ConnectResponse.Refused, _Mapping]] = ..., other_name: _Optional[_Union[ConnectResponse.OtherName, _Mapping]] = ..., name: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., host: _Optional[_Union[Host, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("session", "acknowledged", "hello", "use")
    class Hello(_message.Message):
        __slots__ = ("holds_snapshot", "version")
        HOLDS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        holds_snapshot: bool
        version: int
        def __init__(self, holds_snapshot: bool = ..., version: _Optional[int] = ...) -> None: ...
    class Use(_message.Message):
        __slots__ = ("idle", "idle_ms")
        IDLE_FIELD_NUMBER: _ClassVar[int]
        IDLE_MS_FIELD_NUMBER: _ClassVar[int]
        idle: bool
        idle_ms: int
        def __init__(self, idle: bool = ..., idle_ms: _Optional[int] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    session: int
    acknowledged: int
    hello: WatchRequest.Hello
    use: WatchRequest.Use
    def __init__(self, session: _Optional[int] = ..., acknowledged: _Optional[int] = ..., hello: _Optional[_Union[WatchRequest.Hello, _Mapping]] = ..., use: _Optional[_Union[WatchRequest.Use, _Mapping]] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("session", "welcome", "fragment", "farewell", "forgotten", "retire")
    class Welcome(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Farewell(_message.Message):
        __slots__ = ("reason",)
        REASON_FIELD_NUMBER: _ClassVar[int]
        reason: str
        def __init__(self, reason: _Optional[str] = ...) -> None: ...
    class Retire(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    session: int
    welcome: WatchResponse.Welcome
    fragment: Fragment
    farewell: WatchResponse.Farewell
    forgotten: Forgotten
    retire: WatchResponse.Retire
    def __init__(self, session: _Optional[int] = ..., welcome: _Optional[_Union[WatchResponse.Welcome, _Mapping]] = ..., fragment: _Optional[_Union[Fragment, _Mapping]] = ..., farewell: _Optional[_Union[WatchResponse.Farewell, _Mapping]] = ..., forgotten: _Optional[_Union[Forgotten, _Mapping]] = ..., retire: _Optional[_Union[WatchResponse.Retire, _Mapping]] = ...) -> None: ...

class GetSegmentRequest(_message.Message):
    __slots__ = ("session", "holds_snapshot", "version")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOLDS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    holds_snapshot: bool
    version: int
    def __init__(self, session: _Optional[int] = ..., holds_snapshot: bool = ..., version: _Optional[int] = ...) -> None: ...

class GetSegmentResponse(_message.Message):
    __slots__ = ("unchanged", "fragment", "forgotten")
    class Unchanged(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    unchanged: GetSegmentResponse.Unchanged
    fragment: Fragment
    forgotten: Forgotten
    def __init__(self, unchanged: _Optional[_Union[GetSegmentResponse.Unchanged, _Mapping]] = ..., fragment: _Optional[_Union[Fragment, _Mapping]] = ..., forgotten: _Optional[_Union[Forgotten, _Mapping]] = ...) -> None: ...

class BootstrapRequest(_message.Message):
    __slots__ = ("session", "transport", "number", "payload")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    session: int
    transport: str
    number: TransportType
    payload: bytes
    def __init__(self, session: _Optional[int] = ..., transport: _Optional[str] = ..., number: _Optional[_Union[TransportType, str]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class BootstrapResponse(_message.Message):
    __slots__ = ("payload", "error", "forgotten")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    error: str
    forgotten: Forgotten
    def __init__(self, payload: _Optional[bytes] = ..., error: _Optional[str] = ..., forgotten: _Optional[_Union[Forgotten, _Mapping]] = ...) -> None: ...

class Checksum(_message.Message):
    __slots__ = ("buffer", "generation", "offsets", "lengths", "crc32c")
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    buffer: int
    generation: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    crc32c: int
    def __init__(self, buffer: _Optional[int] = ..., generation: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Notification(_message.Message):
    __slots__ = ("sequence", "name", "payload", "failure", "checksums")
    class Failure(_message.Message):
        __slots__ = ("reason",)
        REASON_FIELD_NUMBER: _ClassVar[int]
        reason: str
        def __init__(self, reason: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    name: str
    payload: bytes
    failure: Notification.Failure
    checksums: _containers.RepeatedCompositeFieldContainer[Checksum]
    def __init__(self, sequence: _Optional[int] = ..., name: _Optional[str] = ..., payload: _Optional[bytes] = ..., failure: _Optional[_Union[Notification.Failure, _Mapping]] = ..., checksums: _Optional[_Iterable[_Union[Checksum, _Mapping]]] = ...) -> None: ...

class NotifyRequest(_message.Message):
    __slots__ = ("session", "notifications")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NOTIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    session: int
    notifications: _containers.RepeatedCompositeFieldContainer[Notification]
    def __init__(self, session: _Optional[int] = ..., notifications: _Optional[_Iterable[_Union[Notification, _Mapping]]] = ...) -> None: ...

class NotifyResponse(_message.Message):
    __slots__ = ("taken", "forgotten")
    class Taken(_message.Message):
        __slots__ = ("through", "full")
        THROUGH_FIELD_NUMBER: _ClassVar[int]
        FULL_FIELD_NUMBER: _ClassVar[int]
        through: int
        full: bool
        def __init__(self, through: _Optional[int] = ..., full: bool = ...) -> None: ...
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    taken: NotifyResponse.Taken
    forgotten: Forgotten
    def __init__(self, taken: _Optional[_Union[NotifyResponse.Taken, _Mapping]] = ..., forgotten: _Optional[_Union[Forgotten, _Mapping]] = ...) -> None: ...

class GoodbyeRequest(_message.Message):
    __slots__ = ("session", "reason", "retired")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    session: int
    reason: str
    retired: bool
    def __init__(self, session: _Optional[int] = ..., reason: _Optional[str] = ..., retired: bool = ...) -> None: ...

class GoodbyeResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("document",)
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    document: bytes
    def __init__(self, document: _Optional[bytes] = ...) -> None: ...
