//! An authority of our own, a stranger, and what the first has signed.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// The only host that the server's certificate is for; its address is not.
const HOST: &str = "localhost";

/// A directory with certificates and keys in PEM form.
///
/// | file | what |
/// |---|---|
/// | `ca.pem` | the authority that signed the two below |
/// | `other-ca.pem` | an authority that signed neither |
/// | `server.pem`, `server.key` | the server's, for `localhost` and no address |
/// | `client.pem`, `client.key` | a client's |
#[derive(Clone, Debug)]
pub struct Certificates {
    dir: PathBuf,
}

impl Certificates {
    /// Makes new ones in this directory, unless it has some already.
    ///
    /// # Errors
    ///
    /// The directory cannot be written to.
    pub fn create(dir: &Path) -> Result<Self> {
        let this = Self { dir: dir.to_owned() };
        if !this.path("client.key").exists() {
            fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
            this.write_all()?;
        }
        Ok(this)
    }

    /// Where a file of this name is.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn write_all(&self) -> Result<()> {
        let (ours, issuer) = authority("Simba's test authority")?;
        self.write("ca.pem", &ours)?;
        self.write("other-ca.pem", &authority("A stranger's authority")?.0)?;
        for (name, purpose) in
            [("server", ExtendedKeyUsagePurpose::ServerAuth), ("client", ExtendedKeyUsagePurpose::ClientAuth)]
        {
            let mut params = CertificateParams::new(vec![HOST.to_owned()])?;
            params.distinguished_name.push(DnType::CommonName, format!("simba {name}"));
            params.extended_key_usages.push(purpose);
            let key = KeyPair::generate()?;
            self.write(&format!("{name}.pem"), &params.signed_by(&key, &issuer)?.pem())?;
            self.write(&format!("{name}.key"), &key.serialize_pem())?;
        }
        Ok(())
    }

    /// Keys are for their owner alone; servers insist.
    fn write(&self, name: &str, pem: &str) -> Result<()> {
        let path = self.path(name);
        fs::write(&path, pem).with_context(|| format!("cannot write {}", path.display()))?;
        let mode = if name.ends_with(".key") { 0o600 } else { 0o644 };
        Ok(fs::set_permissions(&path, fs::Permissions::from_mode(mode))?)
    }
}

fn authority(name: &str) -> Result<(String, Issuer<'static, KeyPair>)> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    Ok((certificate.pem(), Issuer::new(params, key)))
}
