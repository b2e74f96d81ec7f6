use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use simba_core::Result;
use simba_tck::FaultProxy;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// Starts a proxy in front of a server, and connects through it.
pub async fn behind_proxy<B, F>(
    server: SocketAddr,
    connect: impl FnOnce(SocketAddr) -> F + Send,
) -> (B, Arc<FaultProxy>)
where
    F: Future<Output = Result<B>> + Send,
{
    let proxy = Arc::new(FaultProxy::start(server).await.unwrap());
    let backend = connect(proxy.address()).await.unwrap_or_else(|error| panic!("cannot connect: {error:?}"));
    (backend, proxy)
}

/// Starts a server of another kind: it answers every client as an HTTP server would.
pub async fn http_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 64]).await;
                let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            });
        }
    });
    address
}
