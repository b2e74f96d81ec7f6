use std::future::Future;
use std::net::SocketAddr;

use simba_core::spi::{Backend, ConnectUrl, Password};
use simba_core::{Result, Simba};
use simba_tck::FaultProxy;

use crate::{long, name_for, soon};

/// Checks that a handle reads its password file at every connection: it logs in again after the password has changed.
///
/// `url` is the store's URL without a password, for this address. `change` sets the password of its user at the server.
pub async fn follows_password_file<B, C, D>(
    server: SocketAddr,
    url: impl Fn(SocketAddr) -> String,
    mut change: impl FnMut(&'static str) -> D,
    connect: impl FnOnce(ConnectUrl) -> C,
) where
    B: Backend + 'static,
    C: Future<Output = Result<B>>,
    D: Future<Output = ()>,
{
    let file = std::env::temp_dir().join(name_for("simba-password").as_str());
    let proxy = FaultProxy::start(server).await.unwrap();
    let mut set = async |password: &'static str| {
        // Before the change, which may restart the server and so end the connection.
        std::fs::write(&file, format!("{password}\n")).unwrap();
        change(password).await;
    };
    set("the-first-secret").await;
    let url: ConnectUrl = url(proxy.address()).parse().unwrap();
    let url = url.with_password(Password::in_file(&file));
    let simba = Simba::new(connect(url).await.unwrap());
    let locker = |what| simba.locker(name_for(what)).with_lease(long());
    let held = soon("the first password is accepted", locker("held").lock()).await.unwrap();
    set("the-second-secret").await;
    proxy.cut();
    soon("the second password is read", locker("next").lock()).await.unwrap().release().await.unwrap();
    assert!(held.is_held(), "broken: a new password costs no lease");
    held.release().await.unwrap();
    std::fs::remove_file(&file).unwrap();
}
