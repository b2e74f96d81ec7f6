//! The members of a cluster of etcd.

use std::net::SocketAddr;

use anyhow::Result;

use super::said;
use crate::kinds::etcd::{health, membership};
use crate::setup::{Setup, free_address};

/// As many as that, which know each other. All must be told the same addresses of each other: they are known by them.
pub(super) fn members(count: usize) -> Result<Vec<Setup>> {
    let peers: Vec<SocketAddr> = (0..count).map(|_| free_address()).collect::<Result<_>>()?;
    let member = |own| membership(own, &peers).into_iter().fold(Setup::etcd(), Setup::with_setting);
    Ok((0..count).map(member).collect())
}

pub(super) fn leads(address: SocketAddr) -> Result<bool> {
    let said = said(health(address), "GET /metrics HTTP/1.0\r\n\r\n")?;
    Ok(said.contains("\netcd_server_is_leader 1\n"))
}
