//! The authority of one cluster, which signs the certificates of its members.

use super::certificate::CertificateFacts;
use super::private_file;
use graviola::signing::eddsa::Ed25519SigningKey;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyIdMethod, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber, SignatureAlgorithm,
    SigningKey,
};
use rustls_pki_types::PrivatePkcs8KeyDer;
use rustls_pki_types::pem::PemObject;
use std::path::Path;
use tensorwire::TaskId;
use time::{Duration, OffsetDateTime};

const CA: &str = "ca.pem";
const CA_KEY: &str = "ca.key";
/// Days for which an authority holds.
const CA_DAYS: u32 = 3650;
/// A member's clock may be behind this one by so much.
const SKEW: Duration = Duration::hours(1);
/// Room for an Ed25519 key in DER.
const DER: usize = 128;

/// An Ed25519 key.
struct Ed25519Key {
    private: Ed25519SigningKey,
    public: [u8; 32],
}

impl Ed25519Key {
    fn generate() -> Result<Self, String> {
        Ed25519SigningKey::generate().map(Self::of).map_err(|error| format!("{error:?}"))
    }

    fn of(private: Ed25519SigningKey) -> Self {
        Ed25519Key { public: private.public_key().as_bytes(), private }
    }

    fn read(path: &Path) -> Result<Self, String> {
        let at = |why: String| format!("{}: {why}", path.display());
        let der = PrivatePkcs8KeyDer::from_pem_file(path).map_err(|error| at(error.to_string()))?;
        let key = Ed25519SigningKey::from_pkcs8_der(der.secret_pkcs8_der());
        key.map(Self::of).map_err(|_| at("it is no Ed25519 key".into()))
    }

    fn pem(&self) -> Result<String, String> {
        let mut der = [0; DER];
        let der = self.private.to_pkcs8_der(&mut der).map_err(|error| format!("{error:?}"))?;
        Ok(pem::encode(&pem::Pem::new("PRIVATE KEY", der)))
    }
}

impl PublicKeyData for Ed25519Key {
    fn der_bytes(&self) -> &[u8] {
        &self.public
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &rcgen::PKCS_ED25519
    }
}

impl SigningKey for Ed25519Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        Ok(self.private.sign(message).to_vec())
    }
}

/// Signs certificates.
pub struct Authority(Issuer<'static, Ed25519Key>);

impl Authority {
    /// The authority of a folder, which is made if there is none.
    pub fn of(folder: &Path) -> Result<Self, String> {
        let (certificate, private) = (folder.join(CA), folder.join(CA_KEY));
        match (certificate.exists(), private.exists()) {
            (true, true) => {
                private_file::check(&private).map_err(|why| format!("{}: {why}", private.display()))?;
                private_file::check_public(&certificate)
                    .map_err(|why| format!("{}: {why}", certificate.display()))?;
                let key = Ed25519Key::read(&private)?;
                CertificateFacts::read(&certificate)
                    .and_then(|facts| {
                        facts.check(&key.public, &authority_name(&key), OffsetDateTime::now_utc())
                    })
                    .map_err(|why| format!("{}: {why}", certificate.display()))?;
                Ok(Authority(Issuer::new(authority_params(&key)?, key)))
            }
            (false, false) => {
                let key = Ed25519Key::generate()?;
                let params = authority_params(&key)?;
                let signed = params.self_signed(&key).map_err(|error| error.to_string())?;
                put(&private, &key.pem()?)?;
                put(&certificate, &signed.pem())?;
                Ok(Authority(Issuer::new(params, key)))
            }
            (has, _) => {
                let (there, missing) = if has { (CA, CA_KEY) } else { (CA_KEY, CA) };
                Err(format!("it has {there} and no {missing}: add that, or remove {there}"))
            }
        }
    }

    /// Writes certificate and key of a member.
    pub fn issue(&self, folder: &Path, member: &TaskId, days: u32) -> Result<(), String> {
        let key = Ed25519Key::generate()?;
        let signed = self.sign(&key, member, days)?;
        let file = |ending: &str| folder.join(format!("{}-{}.{ending}", member.job(), member.task()));
        put(&file("key"), &key.pem()?)?;
        put(&file("pem"), &signed.pem())
    }

    fn sign(&self, key: &Ed25519Key, member: &TaskId, days: u32) -> Result<Certificate, String> {
        let mut params = params(&member.to_string(), days)?;
        let uri = format!("tensorwire:{member}").try_into();
        params.subject_alt_names = vec![SanType::URI(uri.map_err(|error: rcgen::Error| error.to_string())?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.signed_by(key, &self.0).map_err(|error| error.to_string())
    }
}

/// The name of the authority with this key. Verifiers look for an authority by its name, and
/// operators tell two by theirs while one replaces the other.
fn authority_name(key: &Ed25519Key) -> String {
    let digits: String = key.public[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("tensorwire authority {digits}")
}

/// The same for each run, so that a later run signs for the same authority.
fn authority_params(key: &Ed25519Key) -> Result<CertificateParams, String> {
    let mut params = params(&authority_name(key), CA_DAYS)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.key_identifier_method = KeyIdMethod::PreSpecified(key.public[..20].to_vec());
    Ok(params)
}

fn params(name: &str, days: u32) -> Result<CertificateParams, String> {
    let mut params = CertificateParams::default();
    let now = OffsetDateTime::now_utc();
    (params.not_before, params.not_after) = (now - SKEW, now + Duration::days(days.into()));
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let mut serial = [0; 16];
    getrandom::fill(&mut serial).map_err(|error| error.to_string())?;
    serial[0] &= 0x7f;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    Ok(params)
}

fn put(path: &Path, text: &str) -> Result<(), String> {
    private_file::replace(path, text.as_bytes()).map_err(|error| format!("{}: {error}", path.display()))
}
