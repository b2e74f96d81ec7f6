//! The wire format: the requests and replies that a latch needs, their encoding, and one mechanism of SASL.

mod code;
mod frame;
mod jute;
pub(crate) mod message;
mod names;
pub(crate) mod sasl;

pub(crate) use code::Code;
pub(crate) use frame::Frames;
pub(crate) use jute::{Malformed, Reader, Writer};
pub(crate) use message::{Access, Mode, Reply, Request, Stat};
pub(crate) use names::Names;
